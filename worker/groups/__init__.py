"""Process groups: payloads of large letters between devices by NCCL, one group an epoch.

Owns which letters take it and what becomes of them when it breaks. Does not own the letters' truth: the
transport carries every header and every word about groups, and any payload that a group has lost.
docs/groups.md has the whole protocol.
"""
