"""Processes as children: started, watched, ended and reaped."""
