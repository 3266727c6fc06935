"""What happened, as plain data: records of steps, recordings, the step table."""
