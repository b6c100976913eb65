"""`ckptio bench`: what loading costs on this machine, by every loader that is installed, in one run."""
