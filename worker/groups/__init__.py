"""The fast road: payloads of large letters between devices by process groups, one group an epoch.

Owns which letters take it and what becomes of them when it breaks. Does not own the letters' truth: the
transport carries every header and every word about the road, and any payload that the road has lost.
docs/groups.md has the whole protocol.
"""
