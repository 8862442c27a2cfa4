"""What a job's run is drawn from and told with: panels of curves, and a report as one HTML page."""
