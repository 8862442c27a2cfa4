"""Drawing with characters, for console and oobleckctl alike: lines of text with roles, bars, schedules."""
