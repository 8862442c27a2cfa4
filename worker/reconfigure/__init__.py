"""A new layout on its way in: state that is missing comes from peers, some of it ahead of the plan
(pre-copy).
"""
