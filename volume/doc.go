// Package volume is the domain of the driver: volume IDs, records, capabilities, sizes, StorageClass
// parameters, and the errors of all other packages.
//
// It is pure: it opens no file, makes no system call and does not import gRPC.
package volume
