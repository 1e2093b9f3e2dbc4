// Package csi is the volume plugin for CSI drivers: it registers them as a kubelet does,
// and is the client of their Identity, Node and Controller services.
//
// Drivers are not trusted: after each call that mounts or unmounts, the plugin checks the mount
// table. The record of an operation is durable before the call to the driver, and removed after
// the call that undoes it. After a crash the records contain every volume that may be mounted or
// attached. A record that exists but cannot be read is called torn.
package csi
