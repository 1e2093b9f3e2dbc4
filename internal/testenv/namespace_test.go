package testenv_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestMountsArePrivate: the mounts of a test are not visible in the mount namespace of its parent process.
func TestMountsArePrivate(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "8M")
	for pid, want := range map[int]bool{os.Getpid(): true, os.Getppid(): false} {
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(string(table), dir); got != want {
			t.Errorf("mount table of process %d contains %s: got %t, want %t", pid, dir, got, want)
		}
	}
}
