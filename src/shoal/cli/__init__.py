"""The command line: one thin file for each command. Only this room prints or exits."""
