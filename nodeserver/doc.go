// Package nodeserver is the CSI Node service: a volume's one mount on this node
// (stage), its bind mounts for pods (publish), and what can be seen of them.
//
// What is mounted where is asked of the kernel each time. Making a volume
// present on the node is the backends' work.
package nodeserver
