from shoal.cli.main import program

program()
