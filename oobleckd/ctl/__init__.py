"""oobleckctl. Imports none of torch, textual, aiohttp and zmq at start."""
