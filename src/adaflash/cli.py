"""The console script `adaflash`: hands over to the command line of the room that is asked for."""


def main() -> None:
    from adaflash.server.cli import main as server_main

    server_main()
