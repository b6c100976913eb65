"""The router: HTTP API, tokenisation, the tokens of every running request, the route table."""
