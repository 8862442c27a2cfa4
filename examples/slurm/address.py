#!/usr/bin/env python3
"""Prints the address of this machine that its route to another has: address.py HOST. Nothing is sent."""

import socket
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], 9))
    print(probe.getsockname()[0])
