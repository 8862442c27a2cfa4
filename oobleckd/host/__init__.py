"""What daemon, command line and worker need of the machine that they run on: files, sockets, scheduling,
systemd, settings.

A leaf beside the pure ``protocol``, of which it knows the words.
"""
