"""Token numbers in files: what `oobleckctl data prepare` writes, what others wrote, and their identity."""
