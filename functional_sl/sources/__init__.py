"""Where data comes from: stored episodes, demonstrations and simulated motion."""
