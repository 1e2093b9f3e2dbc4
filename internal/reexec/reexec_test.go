package reexec_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/reexec"
)

const (
	echoRole  = "echo"
	exitRole  = "exit"
	panicRole = "panic"
	hangRole  = "hang"
)

type greeting struct{ Text string }

// roles are the roles of the children in the tests.
var roles = map[string]reexec.Role{
	// echo sends the text of its arguments, of its files, and of the connection.
	echoRole: func(in reexec.Input) error {
		var args greeting
		if err := in.Decode(&args); err != nil {
			return err
		}
		readers := []io.Reader{strings.NewReader(args.Text)}
		for _, f := range in.Files {
			readers = append(readers, strings.NewReader(filepath.Base(f.Name())), f)
		}
		_, err := io.Copy(in.Conn, io.MultiReader(append(readers, in.Conn)...))
		return err
	},
	exitRole:  func(reexec.Input) error { return errors.New("the role failed") },
	panicRole: func(reexec.Input) error { panic("the role panicked") },
	hangRole:  func(reexec.Input) error { select {} },
}

func TestMain(m *testing.M) {
	isChild, err := reexec.Run(os.Args, roles)
	if !isChild {
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
}

// start starts a quiet child, which is killed when the test ends.
func start(t *testing.T, child reexec.Child) *reexec.Process {
	t.Helper()
	child.Program, child.Quiet = reexec.Self, true
	p, err := child.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Conn.Close()
		p.Kill()
		<-p.Done()
	})
	return p
}

// wantEnd waits for the end of a child. It fails the test unless the child's error contains text, or is nil if
// text is empty.
func wantEnd(t *testing.T, p *reexec.Process, text string) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the child does not end")
	}
	if err := p.Err(); (err == nil) != (text == "") || text != "" && !strings.Contains(err.Error(), text) {
		t.Errorf("the child ended: got error %v, want %q", err, text)
	}
}

// TestChild: a child receives its arguments, its files, and the data that its parent sends until it closes the
// connection.
func TestChild(t *testing.T) {
	for _, detached := range []bool{false, true} {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		if _, err := f.WriteAt([]byte("content"), 0); err != nil {
			t.Fatal(err)
		}
		long := strings.Repeat("x", 1<<20) // more than a socket's buffer
		p := start(t, reexec.Child{Role: echoRole, Label: []string{"label"}, Args: greeting{"argument"}, Files: []*os.File{f}, Detached: detached})
		go func() {
			_, _ = io.WriteString(p.Conn, long)
			_ = p.Conn.CloseWrite()
		}()
		got, err := io.ReadAll(p.Conn)
		if want := "argument" + filepath.Base(f.Name()) + "content" + long; err != nil || string(got) != want {
			t.Errorf("detached=%t: got %.60q…, %v from the child, want %.60q…", detached, got, err, want)
		}
		wantEnd(t, p, "")
	}
}

// TestFailingChild: when a child fails, the connection ends, and the child's error contains its output.
func TestFailingChild(t *testing.T) {
	for role, text := range map[string]string{exitRole: "the role failed", panicRole: "exit status 2"} {
		p := start(t, reexec.Child{Role: role})
		if got, err := io.ReadAll(p.Conn); len(got) > 0 || err != nil && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("role %s: got %q, %v from the child, want no data", role, got, err)
		}
		wantEnd(t, p, text)
	}
}

// TestHangingChild: a deadline of the connection ends the wait for a child that hangs, and the child can
// be killed.
func TestHangingChild(t *testing.T) {
	p := start(t, reexec.Child{Role: hangRole})
	if err := p.Conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read: got %v, want ErrDeadlineExceeded", err)
	}
	if err := p.Err(); err != nil {
		t.Errorf("the child ended before it was killed: %v", err)
	}
	p.Kill()
	wantEnd(t, p, "killed")
}

// TestStartFails: Start fails for a program that does not exist, for arguments that JSON cannot contain or
// that are too long, and for a child that ends without reading its arguments. It does not block.
func TestStartFails(t *testing.T) {
	for name, child := range map[string]reexec.Child{
		"missing program":   {Program: filepath.Join(t.TempDir(), "none")},
		"invalid arguments": {Program: reexec.Self, Args: make(chan int)},
		"ended child":       {Program: "/bin/false", Args: strings.Repeat("x", 8<<20)},
		"long arguments":    {Program: reexec.Self, Args: strings.Repeat("x", 17<<20)},
	} {
		child.Role, child.Quiet = echoRole, true
		if p, err := child.Start(); err == nil {
			p.Kill()
			t.Errorf("%s: Start: got no error, want one", name)
		}
	}
}

// TestInvalidParent: a child fails without a parent, and with a parent that sends invalid
// arguments or ends.
func TestInvalidParent(t *testing.T) {
	header := func(size int, text string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(size)), text...)
	}
	const tooLong = "header over the limit"
	for name, sent := range map[string][]byte{
		tooLong: header(math.MaxUint32, "{"), "no connection": nil, "no data": {}, "half a length": {0, 0}, "half a header": header(9, "{"),
		"no JSON": header(5, "hello"), "invalid arguments": header(13, `{"Args":true}`),
	} {
		child := exec.CommandContext(t.Context(), reexec.Self, echoRole)
		var parent net.Conn
		if sent != nil {
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			ours, theirs := os.NewFile(uintptr(fds[0]), "parent"), os.NewFile(uintptr(fds[1]), "child")
			child.ExtraFiles = []*os.File{theirs}
			parent, err = net.FileConn(ours)
			_ = ours.Close()
			if err == nil {
				_, err = parent.Write(sent)
			}
			if err != nil {
				t.Fatal(err)
			}
			_ = parent.Close()
			defer func() { _ = theirs.Close() }()
		}
		output, err := child.CombinedOutput()
		tooLongRefused := strings.Contains(string(output), "header of 4294967295 bytes")
		if child.ProcessState.ExitCode() != 3 || len(output) == 0 || tooLongRefused != (name == tooLong) {
			t.Errorf("%s: got %v and output %s, want exit status 3 and an error", name, err, output)
		}
	}
}

// TestNoRole: Run returns isChild=false for arguments without a role.
func TestNoRole(t *testing.T) {
	for _, args := range [][]string{nil, {"program"}, {"program", "other"}, {"program", "other", echoRole}} {
		if isChild, err := reexec.Run(args, roles); isChild || err != nil {
			t.Errorf("Run(%q): got isChild=%t, %v, want false", args, isChild, err)
		}
	}
}
