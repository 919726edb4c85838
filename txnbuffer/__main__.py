"""`python -m txnbuffer` is `txnbuf`."""

from txnbuffer.cli import main

if __name__ == "__main__":
    main()
