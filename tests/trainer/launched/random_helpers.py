WHOSE = "the program's"
