package command_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/command"
)

// TestMain is also a program for tests: with the argument "parent" or "detaching", it starts a child, prints the
// child's PID, and waits to be killed.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "parent" || os.Args[1] == "detaching") {
		sleep := command.Command{Name: "sleep", Args: []string{"1000"}}
		start := sleep.StartDetached
		if os.Args[1] == "parent" {
			start = func() (*command.Child, error) { return sleep.Start(nil) }
		}
		child, err := start()
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(child.PID())
		select {}
	}
	os.Exit(m.Run())
}

// awaitEnd waits until a process has ended or is a zombie.
func awaitEnd(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") { // an orphan may remain a zombie
			return
		}
		if time.Now().After(end) {
			t.Fatalf("process %d does not end", pid)
		}
	}
}

// TestChild: a child reads its input and inherits files. Its error contains the exit status and the output.
func TestChild(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	child, err := command.Command{Name: "sh", Args: []string{"-c", "cat >&3; echo it broke >&2; exit 7"}, Hold: []*os.File{w}}.Start([]byte("hello\n"))
	w.Close() // the child has its own descriptor
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(r).ReadString('\n'); line != "hello\n" {
		t.Errorf("got %q, %v from the child, want its input", line, err)
	}
	<-child.Done()
	if err := child.Err(); err == nil || !strings.Contains(err.Error(), "exit status 7") || !strings.Contains(err.Error(), "it broke") {
		t.Errorf("got error %v, want the exit status and the output", err)
	}
	child.Kill() // has no effect after the end
}

// TestChildKilled: a killed child ends with an error.
func TestChildKilled(t *testing.T) {
	child, err := command.Command{Name: "sleep", Args: []string{"1000"}}.Start(nil)
	if err != nil {
		t.Fatal(err)
	}
	if child.Err() != nil {
		t.Errorf("Err of a running child: got %v, want nil", child.Err())
	}
	child.Kill()
	<-child.Done()
	if child.Err() == nil {
		t.Error("Err of a killed child: got nil, want an error")
	}
}

// orphan runs TestMain with an argument, kills that process, and returns the PID of its child.
func orphan(t *testing.T, argument string) (pid int) {
	t.Helper()
	parent := exec.Command(os.Args[0], argument)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err = strconv.Atoi(strings.TrimSpace(line))
	if err != nil || syscall.Kill(pid, 0) != nil {
		t.Fatalf("the parent printed %q (%v), want the PID of a running child", line, err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	return pid
}

// TestChildOfKilledParent: a child ends with its parent, also if the parent is killed.
func TestChildOfKilledParent(t *testing.T) { awaitEnd(t, orphan(t, "parent")) }

// TestDetached: a detached child continues in its own process group when its parent is killed.
func TestDetached(t *testing.T) {
	pid := orphan(t, "detaching")
	if group, err := syscall.Getpgid(pid); err != nil || group != pid {
		t.Errorf("got process group %d, %v, want %d", group, err, pid)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	awaitEnd(t, pid)
}

// TestChildMissing: the error for a program that does not exist is ErrMissing.
func TestChildMissing(t *testing.T) {
	missing := command.Command{Name: "/nowhere/program"}
	if _, err := missing.Start(nil); !errors.Is(err, command.ErrMissing) {
		t.Errorf("Start: got %v, want ErrMissing", err)
	}
	if _, err := missing.StartDetached(); !errors.Is(err, command.ErrMissing) {
		t.Errorf("StartDetached: got %v, want ErrMissing", err)
	}
}
