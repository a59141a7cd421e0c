"""Views: a published version in a form that other serving hosts load, as one graph with its weights.

interface   which tensors a view takes and gives            no torch
source      a version's files, digested as they are read
mapping     a raw request as the tensors that a view takes
module      lookups and dense part as one nn.Module
triton      AOTInductor package and config.pbtxt
onnx        ONNX file
check       answers a request through a written view, in a process of its own
place       a folder that is there wholly or not at all
export      one view from beginning to end
command     `publisher export`                              no torch
"""
