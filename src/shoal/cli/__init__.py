"""The command line: one thin file for each command. Only this folder prints or exits."""
