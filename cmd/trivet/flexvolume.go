package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/volume"
)

// flexvolumeTime is how long a call may take. A kubelet sets none; the volume manager
// waits two minutes.
const flexvolumeTime = 110 * time.Second

// Where a FlexVolume executable finds its configuration, the first that is there:
// $TRIVET_FLEXVOLUME_CONFIG, flexvolumeBeside in the executable's own directory,
// flexvolumeConfig, and the driver's.
const (
	flexvolumeBeside   = "config.yaml"
	flexvolumeConfig   = "/etc/trivet/flexvolume.yaml"
	flexvolumeStateDir = "/var/lib/trivet/flexvolume"

	flexvolumeConfigVariable   = "TRIVET_FLEXVOLUME_CONFIG"
	flexvolumeStateDirVariable = "TRIVET_FLEXVOLUME_STATE_DIR"
)

// flexvolumeDir is the directory of a program that a kubelet runs as a FlexVolume
// driver: <vendor>~<driver>; empty for any other.
func flexvolumeDir(program string) string {
	dir := filepath.Dir(program)
	vendor, name, ok := strings.Cut(filepath.Base(dir), "~")
	if !ok || vendor == "" || name == "" {
		return ""
	}
	return dir
}

const flexvolumeUsage = `usage: trivet flexvolume CALL [ARGUMENT]...

Answers one call of a kubelet, or of trivet volume-manager, in one line of JSON, as a
FlexVolume driver: init, mount, unmount, expandvolume, expandfs. A kubelet runs it as
<vendor>~<driver>/<driver> in its volume plugin directory: a link to this program there
is all that it needs. Of trivet~nfs, trivet~loop and trivet~local the name says the
backend, of any other the option backend.

assign NAMESPACE OPTIONS is for administrators: it gives a volume that is not mounted to
a namespace. The first namespace that mounts a volume has it until then.
`

// runFlexvolume answers one call, in one line. dir is the executable's own directory,
// whose name says the backend; empty: options say it.
func runFlexvolume(dir string, words []string) error {
	if asksForHelp(words) {
		fmt.Print(flexvolumeUsage)
		return errHelp
	}
	quietBesideAnswer()
	return answerInTime(os.Stdout, func(ctx context.Context) flexvolume.Answer { return answerFlexvolume(ctx, dir, words) })
}

// answerInTime writes the answer of a call. One that does not heed its context is not
// waited for: a thread that hangs in the kernel ends with the process.
func answerInTime(out io.Writer, call func(context.Context) flexvolume.Answer) error {
	ctx, cancel := context.WithTimeout(context.Background(), flexvolumeTime)
	defer cancel()
	answered := make(chan flexvolume.Answer, 1)
	go func() { answered <- call(ctx) }()
	var a flexvolume.Answer
	select {
	case a = <-answered:
	case <-time.After(flexvolumeTime + 5*time.Second):
		a = flexvolume.Answer{Status: flexvolume.Failure, Message: fmt.Sprintf("nothing came of it in %v: what the volume is on does not answer; it is tried again", flexvolumeTime)}
	}
	if err := json.NewEncoder(out).Encode(a); err != nil {
		return err
	}
	if a.Status != flexvolume.Success {
		return errAnswered
	}
	return nil
}

// errAnswered ends the process with status 1; the answer says why.
var errAnswered = errors.New("the call failed")

// quietBesideAnswer keeps the log out of the answer where it would get into it: a
// kubelet reads standard output and standard error as one.
func quietBesideAnswer() {
	out, err := os.Stdout.Stat()
	if err != nil {
		return
	}
	log, err := os.Stderr.Stat()
	if err != nil || !os.SameFile(out, log) {
		return
	}
	if nowhere, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0); err == nil {
		os.Stderr = nowhere
	}
}

func answerFlexvolume(ctx context.Context, dir string, words []string) flexvolume.Answer {
	e := flexvolume.Executable{
		StateDir: filepath.Clean(cmp.Or(os.Getenv(flexvolumeStateDirVariable), flexvolumeStateDir)), Backends: backends,
	}
	_, name, _ := strings.Cut(filepath.Base(dir), "~")
	if slices.Contains([]string{volume.BackendLoop, volume.BackendLocal, volume.BackendNFS}, name) {
		e.Backend = name
	}
	path := flexvolumeConfigPath(dir)
	config, err := driver.LoadConfig(path, path == defaultConfig, e.StateDir)
	if err != nil {
		return flexvolume.Answer{Status: flexvolume.Failure, Message: err.Error()}
	}
	e.Pools = config.Pools
	return e.Answer(ctx, words)
}

func flexvolumeConfigPath(dir string) string {
	if path := os.Getenv(flexvolumeConfigVariable); path != "" {
		return path
	}
	paths := []string{flexvolumeConfig}
	if dir != "" {
		paths = slices.Insert(paths, 0, filepath.Join(dir, flexvolumeBeside))
	}
	for _, path := range paths {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return path
		}
	}
	return defaultConfig
}
