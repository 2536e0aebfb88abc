"""The machine that runs a program: interpreter, transport, split layers, pending W passes."""
