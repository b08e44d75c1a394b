"""HTTP in front of an engine that runs in a process of its own. Imports no torch outside that process."""
