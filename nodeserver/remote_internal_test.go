package nodeserver

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// TestStageOptions: a mount has the attributes of its pool and of its class.
func TestStageOptions(t *testing.T) {
	for _, tc := range []struct {
		source mount.Source
		flags  string
		want   string
	}{
		{mount.Source{Device: "/dev/loop0"}, "noexec", "noexec"},
		{mount.Source{NFS: &mount.NFS{}}, "noexec", "noexec"},
		{mount.Source{NFS: &mount.NFS{Options: []string{"hard,noatime", "nosuid"}}}, "noexec,noatime", "noatime,nosuid,noexec"},
	} {
		flags, err := mount.ParseFlags([]string{tc.flags})
		if err != nil {
			t.Fatal(err)
		}
		want, err := mount.ParseFlags([]string{tc.want})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := stageOptions(tc.source, request{options: flags}); err != nil || got.Attr != want.Attr {
			t.Errorf("%+v and %s: %+v, %v", tc.source, tc.flags, got, err)
		}
	}
}

// TestTeardownOfOneMount: only a mount whose own server does not answer is given up.
func TestTeardownOfOneMount(t *testing.T) {
	outage := volume.Errorf(volume.ErrUnavailable, "not now")
	alive, dead := entryAt(serve(t)), entryAt(closed(t))
	for _, tc := range []struct {
		name  string
		says  func() (bool, error)
		e     *mount.Entry
		force bool
		err   error
	}{
		{"no server", nil, dead, false, nil},
		{"it answers", func() (bool, error) { return false, nil }, dead, false, nil},
		{"silent", func() (bool, error) { return true, nil }, dead, true, nil},
		{"silent elsewhere", func() (bool, error) { return true, nil }, alive, false, nil},
		{"outage", func() (bool, error) { return false, outage }, dead, false, outage},
		{"outage elsewhere", func() (bool, error) { return false, outage }, alive, false, nil},
		{"an image's filesystem", func() (bool, error) { return true, nil }, &mount.Entry{FSType: "ext4"}, true, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &Server{Teardown: tc.says}
			if force, err := s.teardown(t.Context(), tc.e); force != tc.force || !errors.Is(err, tc.err) {
				t.Errorf("%t, %v", force, err)
			}
		})
	}
}

// entryAt is a mount from a server on this node.
func entryAt(address net.Addr) *mount.Entry {
	return &mount.Entry{FSType: "nfs4", VFSOptions: fmt.Sprintf("vers=4.2,port=%d,addr=127.0.0.1", address.(*net.TCPAddr).Port)}
}

// closed is an address where nobody listens.
func closed(t *testing.T) net.Addr {
	t.Helper()
	l := listen(t)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.Addr()
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// serve answers NULL calls of RPC (RFC 5531, section 9).
func serve(t *testing.T) net.Addr {
	t.Helper()
	l := listen(t)
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			answer(conn)
		}
	}()
	return l.Addr()
}

func answer(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // only the reply matters
	var head [8]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return
	}
	reply := binary.BigEndian.AppendUint32(nil, 1<<31|24)
	reply = append(reply, head[4:]...)
	for _, word := range []uint32{1, 0, 0, 0, 0} {
		reply = binary.BigEndian.AppendUint32(reply, word)
	}
	_, _ = conn.Write(reply)
}
