"""Records of steps as plain data, recordings of them, and the step table."""
