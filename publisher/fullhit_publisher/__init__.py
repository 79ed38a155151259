"""What an encoder imports to keep an embedding cache and tell a router about it."""
