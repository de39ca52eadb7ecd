from pdq.cli import main

main()
