package nfsd

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

//go:embed node.sh
var nodeScript string

// Link connects a network namespace to that of the server by a pair of veth devices, with IPv4 and IPv6.
type Link struct {
	server *Server
	pid    int // a process in the connected namespace
	n      int // index among the links of the server, from 2, and last number of the client's address
}

// link creates the link from the server to the network namespace of a process.
func (s *Server) link(tb testing.TB, pid int) *Link {
	tb.Helper()
	s.links++
	l := &Link{server: s, pid: pid, n: s.links + 1}
	serverDevice, clientDevice := l.device("s"), l.device("c")
	ip(tb, s.pid, fmt.Sprintf("link add %s type veth peer name %s netns %d", serverDevice, clientDevice, pid))
	l.Restore(tb)
	ip(tb, pid, endCommands(clientDevice, l.Address(), s.Address(), l.Address6(), s.Address6())...)
	return l
}

// device returns the name of the device at one end of the link: "s" is the server, "c" the client.
func (l *Link) device(end string) string {
	return fmt.Sprintf("nfs%d%s%d", l.server.n, end, l.n)
}

// Address returns the IPv4 address of the client.
func (l *Link) Address() string { return fmt.Sprintf("10.90.%d.%d", l.server.n, l.n) }

// Address6 returns the IPv6 address of the client.
func (l *Link) Address6() string { return fmt.Sprintf("fd90:0:0:%x::%x", l.server.n, l.n) }

// Cut drops all packets between the client and the server until Restore. Cut also registers Restore as a clean-up
// function of the test, which runs before the clean-up functions that are registered already.
func (l *Link) Cut(tb testing.TB) {
	tb.Helper()
	tb.Cleanup(func() { l.Restore(tb) })
	ip(tb, l.server.pid, "link set "+l.device("s")+" down")
}

// Restore restores the link.
func (l *Link) Restore(tb testing.TB) {
	tb.Helper()
	s := l.server
	ip(tb, s.pid, endCommands(l.device("s"), s.Address(), l.Address(), s.Address6(), l.Address6())...)
}

// Route lets the server answer to a network behind the client. Cut removes the route.
func (l *Link) Route(tb testing.TB, network string) {
	tb.Helper()
	ip(tb, l.server.pid, fmt.Sprintf("route replace %s via %s", network, l.Address()))
}

// endCommands returns the commands of ip(8) that configure one end of a link. They include addresses and routes,
// because a device that was down has lost its routes and its IPv6 addresses.
func endCommands(device, own, peer, own6, peer6 string) []string {
	return []string{
		fmt.Sprintf("addr replace %s/32 dev %s", own, device),
		fmt.Sprintf("addr replace %s/128 dev %s nodad", own6, device),
		fmt.Sprintf("link set %s up", device),
		fmt.Sprintf("route replace %s/32 dev %s src %s", peer, device, own),
		fmt.Sprintf("route replace %s/128 dev %s src %s", peer6, device, own6),
	}
}

// ip runs commands of ip(8) in the network namespace of a process.
func ip(tb testing.TB, pid int, commands ...string) {
	tb.Helper()
	command := append(enter(pid, "net"), "ip", "-batch", "-")
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("%s: %v\n%s", strings.Join(commands, "; "), err, out)
	}
}

// ServeLocks starts the programs that a client needs for locks over NFSv3: rpcbind and statd.
func (l *Link) ServeLocks(tb testing.TB) {
	tb.Helper()
	startNamespaces(tb, daemonsOf(l.pid), stateScript+"echo ready\nexec sleep infinity >&2\n")
}

// isClient reports whether an info file of /proc/fs/nfsd/clients describes the client of this link.
func (l *Link) isClient(info string) bool {
	return strings.Contains(info, `"`+l.Address()+":") || strings.Contains(info, `"[`+l.Address6()+"]:")
}

// Node simulates a client machine. It has a hostname, a network namespace with a link to the server, and a sysfs
// of that namespace, so that it has its own identity as an NFS client. It shares the files and mounts of the test.
type Node struct {
	*Link
}

// Node starts a node with a hostname. The node and all its processes end with the test.
func (s *Server) Node(tb testing.TB, hostname string) *Node {
	tb.Helper()
	start := []string{"unshare", "--net", "--uts", "--mount", "--propagation", "unchanged"}
	return &Node{s.link(tb, startNamespaces(tb, start, nodeScript, hostname))}
}

// Command returns a command that runs a program in the node. The working directory is /, even if Dir is set.
func (n *Node) Command(name string, args ...string) *exec.Cmd {
	command := slices.Concat(enter(n.pid, "net", "uts", "mount"), []string{name}, args)
	return exec.Command(command[0], command[1:]...)
}

// Identify sets the node's nfs_client/identifier. Hostname and identifier together identify an NFSv4 client. Call
// Identify before the first mount.
func (n *Node) Identify(tb testing.TB, identifier string) {
	tb.Helper()
	file := fmt.Sprintf("/proc/%d/root/sys/fs/nfs/net/nfs_client/identifier", n.pid)
	if err := os.WriteFile(file, []byte(identifier), 0); err != nil {
		tb.Fatal(err)
	}
}

// Join links a node of another server to this server too.
func (s *Server) Join(tb testing.TB, n *Node) *Link {
	tb.Helper()
	return s.link(tb, n.pid)
}
