// LSTM (paper, eq. 20-22), GRU (26-28), light GRU and RNN (4) at one unit, from normalised
// pre-activations, forward and backward; shared by CPU and GPU kernels.
//
// T is a vector or scalar type with `sigmoid` and `hyperbolic_tangent`, declared before inclusion.

#pragma once

#ifndef DEVICE  // function qualifier on GPUs
#define DEVICE inline
#endif

// LSTM, gates i, f, g, o

template <class T>
struct LSTMGates {
  T i, f, g, o;
};

template <class T>
DEVICE LSTMGates<T> lstm_gates(T i, T f, T g, T o) {
  return {sigmoid(i), sigmoid(f), hyperbolic_tangent(g), sigmoid(o)};
}

template <class T>
DEVICE T next_cell(T i, T f, T g, T before) {
  return f * before + i * g;
}

// Gradients of o's pre-activation and tanh's argument, from the gradient d of h = o tau.
template <class T>
struct OutputGrads {
  T gate, cell;
};

template <class T>
DEVICE OutputGrads<T> lstm_output_back(T d, T o, T tau) {
  return {d * tau * o * (1.0f - o), d * o * (1.0f - tau * tau)};
}

// Gradients of the pre-activations of i, f and g, from the gradient d of the new cell state.
template <class T>
struct CellGrads {
  T i, f, g;
};

template <class T>
DEVICE CellGrads<T> next_cell_back(T d, T i, T f, T g, T before) {
  return {d * g * i * (1.0f - i), d * before * f * (1.0f - f), d * i * (1.0f - g * g)};
}

// GRU, gates r, z, n

template <class T>
struct GRUGates {
  T r, z, n;
};

// From the gates' pre-activations, the candidate's input term, and its recurrent term w.
template <class T>
DEVICE GRUGates<T> gru_gates(T r, T z, T input, T w) {
  const T reset = sigmoid(r);
  return {reset, sigmoid(z), hyperbolic_tangent(input + reset * w)};
}

template <class T>
DEVICE T gru_state(const GRUGates<T>& p, T before) {
  return p.n + p.z * (before - p.n);
}

// Gradients of the pre-activations of r, z, n, and of w, from the gradient d of the new state.
template <class T>
struct GRUGrads {
  T r, z, n, w;
};

template <class T>
DEVICE GRUGrads<T> gru_back(T d, const GRUGates<T>& p, T w, T before) {
  const T n = d * (1.0f - p.z) * (1.0f - p.n * p.n);
  return {n * w * p.r * (1.0f - p.r), d * (before - p.n) * p.z * (1.0f - p.z), n, n * p.r};
}

// Light GRU (Ravanelli et al. 2018), gates a, z: z h + (1 - z) relu(a)

template <class T>
DEVICE T rectified(T a) {
  return a <= T{} ? T{} : a;  // propagates NaN
}

template <class T>
DEVICE T light_gru_state(T a, T z, T before) {
  const T n = rectified(a);
  return n + sigmoid(z) * (before - n);
}

// Gradients of the pre-activations of a and z, from z and the gradient d of the new state.
template <class T>
struct LightGRUGrads {
  T a, z;
};

template <class T>
DEVICE LightGRUGrads<T> light_gru_back(T d, T a, T z, T before) {
  return {a <= T{} ? T{} : d * (1.0f - z), d * (before - rectified(a)) * z * (1.0f - z)};
}
