//go:build vm

package nfsd_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestServer tests a server with client tracking, and one of its nodes.
func TestServer(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	export := s.Export(t, "tank/a")
	node := s.Node(t, "node-1")
	t.Run("versions", func(t *testing.T) { testVersions(t, s, node, export) })
	t.Run("addresses", func(t *testing.T) { testAddresses(t, s, node, export) })
	t.Run("cut", func(t *testing.T) { testCut(t, s, node, export) })
	t.Run("restart", func(t *testing.T) { testRestart(t, s, node, export) })
	t.Run("expire", func(t *testing.T) { testExpire(t, s, node, export) })
	t.Run("unexport", func(t *testing.T) { testUnexport(t, s, node, export) })
}

// testVersions: with each NFS version, a node can mount a directory of the export, write to it and lock a file.
func testVersions(t *testing.T, s *nfsd.Server, node *nfsd.Node, export string) {
	node.ServeLocks(t)
	within := filepath.Join(s.Dir(export), "within")
	must(t, os.Mkdir(within, 0o755))
	for _, version := range []string{"3", "4.0", "4.2"} {
		t.Run(version, func(t *testing.T) {
			at := mounted(t, node, "vers="+version, s.Address()+":"+export+"/within")
			must(t, os.WriteFile(filepath.Join(at, "file"), []byte(version), 0o644))
			got, err := os.ReadFile(filepath.Join(within, "file"))
			if err != nil || string(got) != version {
				t.Errorf("content on the server: got %q, %v, want %q", got, err, version)
			}
			must(t, node.Command("flock", "--nonblock", filepath.Join(at, "file"), "true").Run())
		})
	}
}

// testAddresses: a node can mount by the IPv6 address, and the test itself can mount too.
func testAddresses(t *testing.T, s *nfsd.Server, node *nfsd.Node, export string) {
	mounted(t, node, "vers=4.2", "["+s.Address6()+"]:"+export)
	at := t.TempDir()
	testenv.Run(t, "mount", "-t", "nfs", "-o", "vers=4.2", s.Address()+":"+export, at)
	testenv.Run(t, "umount", at)
}

// testCut: Cut and Restore affect only the node of the link.
func testCut(t *testing.T, s *nfsd.Server, node *nfsd.Node, export string) {
	other := s.Node(t, "node-2")
	at, otherMount := mounted(t, node, "vers=4.2,nosharecache", s.Address()+":"+export), mounted(t, other, "vers=4.2,nosharecache", s.Address()+":"+export)
	node.Cut(t)
	if answers(t, at, 2*time.Second) {
		t.Error("the node reaches the server although the link is cut")
	}
	if !answers(t, otherMount, time.Minute) {
		t.Error("the other node does not reach the server")
	}
	node.Restore(t)
	if !answers(t, at, time.Minute) {
		t.Error("the node does not reach the server after the link was restored")
	}
}

// testRestart: with client tracking, a node keeps its lock when the server restarts.
func testRestart(t *testing.T, s *nfsd.Server, node *nfsd.Node, export string) {
	other := s.Node(t, "node-2")
	at, otherMount := mounted(t, node, "vers=4.2,nosharecache", s.Address()+":"+export), mounted(t, other, "vers=4.2,nosharecache", s.Address()+":"+export)
	release := locked(t, node, filepath.Join(at, "lock"))
	s.Restart(t)
	if !answers(t, at, time.Minute) {
		t.Fatal("the server does not answer after its restart")
	}
	if lockable(other, filepath.Join(otherMount, "lock")) {
		t.Error("a second node got the lock after a restart of the server")
	}
	release()
	awaitLockable(t, other, filepath.Join(otherMount, "lock"))
}

// testExpire: when the server removes a client, another node can take the lock of that client.
func testExpire(t *testing.T, s *nfsd.Server, node *nfsd.Node, export string) {
	other := s.Node(t, "node-2")
	at, otherMount := mounted(t, node, "vers=4.2,nosharecache", s.Address()+":"+export), mounted(t, other, "vers=4.2,nosharecache", s.Address()+":"+export)
	locked(t, node, filepath.Join(at, "lock"))
	node.Cut(t)
	s.Expire(t, node.Link)
	awaitLockable(t, other, filepath.Join(otherMount, "lock"))
}

// testUnexport: a removed export returns errors, and an export that is restored works again.
func testUnexport(t *testing.T, s *nfsd.Server, node *nfsd.Node, export string) {
	at := mounted(t, node, "vers=4.2,nosharecache,actimeo=0", s.Address()+":"+export)
	s.Unexport(t, export)
	if _, err := os.Stat(filepath.Join(at, "lock")); err == nil {
		t.Error("stat on a removed export: got no error, want one")
	}
	s.Export(t, "tank/a")
	if _, err := os.Stat(filepath.Join(at, "lock")); err != nil {
		t.Errorf("stat on the restored export: got %v, want no error", err)
	}
}

// TestNoTracking: without client tracking, all locks are lost when the server restarts. Two nodes with one hostname
// and different identifiers are different clients.
func TestNoTracking(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{NoTracking: true, MkfsOptions: []string{"-m", "reflink=0"}, MountOptions: []string{"prjquota"}, Without: []string{"3"}})
	export := s.Export(t, "a")
	node, other := s.Node(t, "node-1"), s.Node(t, "node-1")
	node.Identify(t, "first")
	other.Identify(t, "second")
	at, otherMount := mounted(t, node, "vers=4.2,nosharecache", s.Address()+":"+export), mounted(t, other, "vers=4.2,nosharecache", s.Address()+":"+export)
	locked(t, node, filepath.Join(at, "lock"))
	if lockable(other, filepath.Join(otherMount, "lock")) {
		t.Error("two nodes with different identifiers are the same client")
	}
	s.Restart(t)
	s.EndGrace(t)
	awaitLockable(t, other, filepath.Join(otherMount, "lock"))
}

// mounted mounts with mount.nfs(8) in a node until the test ends, and returns the mount point.
func mounted(t *testing.T, node *nfsd.Node, options, source string) string {
	t.Helper()
	at := t.TempDir()
	if out, err := node.Command("mount", "-t", "nfs", "-o", options, source, at).CombinedOutput(); err != nil {
		t.Fatalf("mount %s: %v\n%s", source, err, out)
	}
	t.Cleanup(func() { testenv.Run(t, "umount", at) })
	return at
}

// answers reports whether the server of the mount at a path answers within a time.
func answers(t *testing.T, at string, within time.Duration) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	return exec.CommandContext(ctx, "stat", "-f", at).Run() == nil
}

// locked locks a file in a node until release is called or the test ends. While the server does not answer, release
// does not return, because a process with a lock does not end.
func locked(t *testing.T, node *nfsd.Node, file string) (release func()) {
	t.Helper()
	holder := node.Command("flock", "--nonblock", "--no-fork", file, "cat")
	stdin, err := holder.StdinPipe()
	must(t, err)
	stdout, err := holder.StdoutPipe()
	must(t, err)
	must(t, holder.Start())
	if _, err := stdin.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := stdout.Read(make([]byte, 1)); n != 1 {
		t.Fatalf("taking the lock of %s failed: %v", file, err)
	}
	release = func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	}
	t.Cleanup(release)
	return release
}

// lockable reports whether a node can lock a file now.
func lockable(node *nfsd.Node, file string) bool {
	return node.Command("flock", "--nonblock", file, "true").Run() == nil
}

// awaitLockable waits until a node can lock a file.
func awaitLockable(t *testing.T, node *nfsd.Node, file string) {
	t.Helper()
	err := retry.For(t.Context(), time.Minute, func() (bool, error) {
		out, err := node.Command("flock", "--nonblock", file, "true").CombinedOutput()
		if err != nil && strings.TrimSpace(string(out)) != "" {
			t.Logf("flock: %s", out)
		}
		return err != nil, err
	})
	if err != nil {
		t.Errorf("the node cannot lock %s: %v", file, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
