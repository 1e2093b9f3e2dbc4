// Package worker keeps what an NFS server can do to a process out of the driver's
// own. A thread that touches a file of a server that does not answer may hang until
// it is killed with its process. So each nfs pool is served by a child of the driver,
// with the same Controller and Node services behind a socket pair; here are those
// that start, watch and kill it (Worker), that find the one for a call (Pools), and
// that pass calls on (Controller, Node). Of the child's side it has what both have
// to agree on (Job, Listen, Report).
//
// Nothing here touches a file or a mount of a server. Whether one answers is asked
// by RPC over a connection of its own.
package worker
