HERE = __name__, __file__
