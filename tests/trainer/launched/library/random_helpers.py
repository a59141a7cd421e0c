WHOSE = "the library's"
