// Package volume is the domain of the driver: volume IDs, records,
// capabilities, sizes, StorageClass parameters and the errors that every
// other package speaks in.
//
// It is pure. Nothing here opens a file, makes a system call or knows gRPC.
package volume
