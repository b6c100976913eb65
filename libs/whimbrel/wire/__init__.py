"""What the services say to each other: messages, records, events, errors, subjects. Pure; imports nothing of ours."""
