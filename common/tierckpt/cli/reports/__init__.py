"""Commands that show what a job did, or does. They change nothing."""
