"""What each command does, from a checked config to its last line on the screen: a file for each command."""
