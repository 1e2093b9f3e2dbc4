// Package driver is one process: the gRPC server on its socket, what every call
// passes through (interceptors, the table of status codes), HTTP, start and
// shutdown. What a call does is not known here.
package driver
