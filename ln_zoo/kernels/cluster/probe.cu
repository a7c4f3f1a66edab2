// Used to query the maximum number of resident clusters; never launched.
extern "C" __global__ void probe(int) {}
