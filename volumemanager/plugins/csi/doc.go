// Package csi is the volume plugin for CSI drivers: it registers them as a kubelet does,
// and is the client of their Identity, Node and Controller services.
//
// No driver is trusted. A mount that it says it made is looked for in the mount table, and
// so is one that it says it took away. What it is about to be asked for is on the disk
// before it is asked, and goes when it has undone it, so that whoever starts after a crash
// knows all that may be mounted or attached.
package csi
