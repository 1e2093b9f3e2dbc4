// Package nodeserver is the CSI Node service: the one mount of a volume on this node
// (stage), its bind mounts for pods (publish), and its usage and health.
//
// The kernel tells what is mounted where; nothing is remembered. The backends make volumes
// available on the node, and a mount.Source hides what kind of storage a volume is.
package nodeserver
