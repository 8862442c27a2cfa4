"""The verb ``get``: lists of what the daemon knows.

``kinds`` is the table of what can be listed and how it may be called, ``columns`` what a table shows of each,
``formats`` how lists are printed, ``verb`` the command line.
"""
