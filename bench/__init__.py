"""Speed, measured. README.md says which program measures what."""
