// Package driver runs the driver's process: its configuration, the gRPC servers with their
// interceptors, HTTP, start and shutdown. It contains no logic of CSI calls.
package driver
