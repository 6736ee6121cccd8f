"""The process that gateways and other clients connect to, and that connects to drafts. Torch-free."""
