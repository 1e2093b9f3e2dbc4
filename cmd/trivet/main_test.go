package main_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// program is the trivet program that the tests run.
var program string

func TestMain(m *testing.M) {
	testenv.Main(testenv.WithProgram{M: m, Path: &program, Flags: []string{"-ldflags", "-X main.version=v1.2.3"}})
}

// TestCommandLine: each command line has an exit status and a text in its output.
func TestCommandLine(t *testing.T) {
	for _, tc := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"version"}, 0, "v1.2.3"},
		{[]string{"--version"}, 0, "trivet v1.2.3"},
		{[]string{"version", "-o", "json"}, 0, `"version": "v1.2.3"`},
		{nil, 0, "trivet [command]"},
		{[]string{"help"}, 0, "trivet [command]"},
		{[]string{"help", "dance"}, 2, `trivet: unknown command "dance". Run 'trivet --help'.`},
		{[]string{"volums"}, 2, `trivet: unknown command "volums" (did you mean volumes?). Run 'trivet --help'.`},
		{[]string{"driver", "--help"}, 0, "--node-id"},
		{[]string{"driver", "--nod-id", "x"}, 2, "trivet driver: unknown flag: --nod-id (did you mean --node-id?). Run 'trivet driver --help'."},
		{[]string{"driver", "extra"}, 2, `unexpected argument "extra"`},
		{[]string{"driver", "--logtostderr"}, 2, "unknown flag: --logtostderr"},
		{[]string{"driver", "--log-format", "xml"}, 2, "must be text or json"},
		{[]string{"driver", "-v", "high"}, 2, `invalid argument "high" for "-v, --v" flag`},
		{[]string{"driver", "--endpoint", "unix:///x/y", "--config", "", "--state-dir", t.TempDir()}, 1, "trivet driver: --node-id is missing"},
		{[]string{"driver", "--node-id", "n", "--config", "/nowhere.yaml"}, 1, "/nowhere.yaml"},
		{[]string{"driver", "--node-id", "n", "--services", "nodes", "--config", ""}, 1, `--services "nodes"`},
		{[]string{"doctor", "--help"}, 0, "unix:///run/trivet/csi.sock"},
		{[]string{"doctor", "--config", "/nowhere.yaml", "--state-dir", "/nowhere"}, 1, "trivet doctor: some checks failed"},
		{[]string{"doctor", "--server", "nas", "--export", "e"}, 1, `--export="e": expected the export's absolute path`},
		{[]string{"doctor", "--server", "127.0.0.1", "--export", "/e", "-o", "json"}, 1, `"name": "export 127.0.0.1:/e, server"`},
		{[]string{"pool"}, 0, "trivet pool [command]"},
		{[]string{"pool", "int"}, 2, `trivet pool: unknown command "int" (did you mean init?)`},
		{[]string{"pool", "init"}, 2, "trivet pool init: give the name of one pool, or --server and --export"},
		{[]string{"pool", "init", "nas", "--server", "nas"}, 2, `unexpected argument "nas"`},
		{[]string{"pool", "init", "missing"}, 1, `pool "missing" is not in /etc/trivet/config.yaml`},
		{[]string{"pool", "init", "--server", "127.0.0.1", "--export", "/e"}, 1, "127.0.0.1:/e"},
		{[]string{"export-task"}, 1, "for this program's own use"},
		{[]string{"flexvolume-driver"}, 1, "for this program's own use"},
		{[]string{"flexvolume", "--help"}, 0, "trivet flexvolume CALL"},
		{[]string{"flexvolume"}, 1, `{"status":"Failure","message":"no call is given`},
		{[]string{"flexvolume", "dance"}, 1, `{"status":"Not supported"}`},
		{[]string{"volume-manager", "--help"}, 0, "--manifests"},
		{[]string{"volume-manager", "dance"}, 2, `unknown command "dance"`},
		{[]string{"volume-manager", "stats"}, 2, "did you mean status?"},
		{[]string{"volume-manager", "status", "--root-dir", "/nowhere"}, 1, "--root-dir /nowhere: no volume manager uses this directory"},
		{[]string{"volume-manager", "wait"}, 2, "as NAME or NAMESPACE/NAME"},
		{[]string{"volume-manager", "wait", "web", "db"}, 2, `unexpected argument "db"`},
		{[]string{"volume-manager", "wait", "web", "--timeout", "soon"}, 2, `"soon" for "--timeout" flag`},
		{[]string{"volume-manager", "wait", "--root-dir", "/nowhere", "web", "--timeout", "1ms"}, 1, "--root-dir /nowhere: no volume manager uses this directory"},
		{[]string{"volumes", "--help"}, 0, "/etc/trivet/config.yaml"},
		{[]string{"volumes", "all"}, 2, `unexpected argument "all"`},
		{[]string{"volumes", "-o", "xml", "--state-dir", "/nowhere"}, 2, `must be table, wide, json or yaml. Run 'trivet volumes --help'.`},
		{[]string{"volumes", "--state-dir", "/nowhere"}, 1, "/nowhere/pools/default"},
	} {
		out, err := exec.Command(program, tc.args...).CombinedOutput()
		code := 0
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			code = exit.ExitCode()
		}
		if code != tc.code || !strings.Contains(string(out), tc.says) {
			t.Errorf("trivet %q: got status %d, output %s, want status %d, output with %q", tc.args, code, out, tc.code, tc.says)
		}
	}
}

// wantStatus1 fails the test unless a command ended with status 1.
func wantStatus1(t *testing.T, err error) {
	t.Helper()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("got %v, want exit status 1", err)
	}
}

// TestSilentServer: trivet volumes lists a pool whose server does not answer with the problem, and also lists the
// other pool.
func TestSilentServer(t *testing.T) {
	state := t.TempDir()
	config := filepath.Join(state, "config.yaml")
	text := "pools:\n- {name: here, directory: {path: " + state + "/here}}\n- {name: nas, nfs: {server: 127.0.0.1, export: /e, mountOptions: [port=1]}}\n"
	must(t, os.WriteFile(config, []byte(text), 0o600))
	out, err := exec.Command(program, "volumes", "--config", config, "--state-dir", state, "-o", "json").Output()
	wantStatus1(t, err)
	var list []struct{ Pool, Problem string }
	if err := json.Unmarshal(out, &list); err != nil || len(list) != 2 || list[0].Pool != "here" || list[1].Pool != "nas" ||
		!strings.Contains(list[1].Problem, "127.0.0.1:/e") {
		t.Errorf("got %+v, error %v, want entries for here and nas, and the problem of nas", list, err)
	}
}

// TestUsageError: a usage error is one line on standard error.
func TestUsageError(t *testing.T) {
	cmd := exec.Command(program, "volumes", "--outptu", "json")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdout, _ := cmd.Output()
	if want := "trivet volumes: unknown flag: --outptu (did you mean --output?). Run 'trivet volumes --help'.\n"; len(stdout) > 0 || stderr.String() != want {
		t.Errorf("got %q on standard output, %q on standard error, want only %q", stdout, &stderr, want)
	}
}

// TestLogFormat: with --log-format json, the driver writes one JSON object per line.
func TestLogFormat(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(program, "driver", "--endpoint", "unix://"+dir+"/csi.sock", "--node-id", "n", "--config", "", "--state-dir", dir,
		"--http-address", "", "-v", "4", "--log-format=json")
	r, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())
	lines := bufio.NewScanner(r)
	lines.Scan()
	var line struct{ TS, Level, Msg string }
	if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.TS == "" || line.Level == "" || line.Msg == "" {
		t.Errorf("got log line %q, error %v, want JSON with ts, level and msg", lines.Bytes(), err)
	}
	must(t, errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait()), lines.Err()))
}

// TestDriverName: CSI_DRIVER_NAME overrides the default of --driver-name.
func TestDriverName(t *testing.T) {
	for want, environment := range map[string][]string{
		`(default "csi.trivet.dev")`:      {"CSI_DRIVER_NAME="},
		`(default "storage.example.com")`: {"CSI_DRIVER_NAME=storage.example.com"},
	} {
		cmd := exec.Command(program, "driver", "--help")
		cmd.Env = environment
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%q: got error %v, output %s, want %s", environment, err, out, want)
		}
	}
	cmd := exec.Command(program, "doctor", "--help")
	cmd.Env = []string{"CSI_DRIVER_NAME=storage.example.com"}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), `(default "storage.example.com")`) {
		t.Errorf("doctor --help: got error %v, output %s, want the default of the environment", err, out)
	}
}

// TestVolumesWithoutDevices: pools are listed even if loop devices cannot be read.
func TestVolumesWithoutDevices(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	hideSys := `mount -t tmpfs none /sys && exec "$0" volumes --config "" --state-dir "$1"`
	out, err := exec.Command("unshare", "--mount", "sh", "-c", hideSys, program, dir).CombinedOutput()
	wantStatus1(t, err)
	for _, want := range []string{dir + "/pools/default", "the staged volumes are unknown", "/sys/block", "some objects could not be read"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the output lacks %q: %s", want, out)
		}
	}
}

// process is a running driver with its flags and clients of its services.
type process struct {
	cmd           *exec.Cmd
	config, state string
	endpoint      string
	log           string // path of its standard error
	node          csi.NodeClient
	ctrl          csi.ControllerClient
}

// run runs another command of the program with the configuration and state of the driver.
func (p *process) run(t *testing.T, command string, args ...string) string {
	t.Helper()
	args = append([]string{command, "--config", p.config, "--state-dir", p.state}, args...)
	out, err := exec.Command(p.cmd.Path, args...).Output()
	if err != nil {
		t.Errorf("trivet %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// start starts a driver with the default configuration and with PATH set to path.
func start(t *testing.T, path string) *process {
	t.Helper()
	return startWith(t, path, "", testenv.Filesystem(t, "xfs", "2G")+"/state")
}

// startWith starts a driver with a configuration file and a state directory, and waits until it is ready.
func startWith(t *testing.T, path, config, state string) *process {
	t.Helper()
	return startProcess(t, []string{"PATH=" + path}, config, state, "--node-id", "n")
}

// startProcess starts a driver with a configuration file, a state directory, variables and other flags, and waits until it
// is ready.
func startProcess(t *testing.T, environment []string, config, state string, flags ...string) *process {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(program, append([]string{
		"driver", "--endpoint", "unix://" + dir + "/csi.sock", "--config", config,
		"--state-dir", state, "--http-address", "",
	}, flags...)...)
	cmd.Env = append(os.Environ(), environment...)
	log, err := os.Create(dir + "/log")
	must(t, err)
	defer log.Close()
	cmd.Stderr = log
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	conn, err := grpc.NewClient("unix://"+dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for ready := false; !ready; {
		resp, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		must(t, err)
		ready = resp.GetReady().GetValue()
	}
	return &process{cmd, config, state, "unix://" + dir + "/csi.sock", log.Name(), csi.NewNodeClient(conn), csi.NewControllerClient(conn)}
}

// TestSignal: a signal ends an idle driver with status 0.
func TestSignal(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		p := start(t, os.Getenv("PATH"))
		must(t, p.cmd.Process.Signal(signal))
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("after %v: got %v, want status 0", signal, err)
		}
	}
}

// TestSecondSignal: after the first signal the driver waits for a running call; the second signal ends it.
func TestSecondSignal(t *testing.T) {
	bin := t.TempDir()
	started := filepath.Join(bin, "started")
	script := "#!/bin/sh\n: > " + started + "\nexec sleep 60\n"
	must(t, os.WriteFile(filepath.Join(bin, "mkfs.xfs"), []byte(script), 0o755))
	p := start(t, bin+":"+os.Getenv("PATH"))
	c := mountCapability("xfs")
	call := make(chan error, 1)
	go func() {
		_, err := p.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v", VolumeCapabilities: []*csi.VolumeCapability{c}})
		call <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(started); err == nil {
			break
		}
		<-tick.C
	}
	ended := make(chan error, 1)
	go func() { ended <- p.cmd.Wait() }()
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-ended:
		t.Fatalf("one signal ended the driver during a running call: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	var exit *exec.ExitError
	if err := <-ended; !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("after the second signal: got %v, want the end by SIGTERM", err)
	}
	if err := <-call; err == nil {
		t.Error("the call succeeded")
	}
}

// TestVolumesAndDoctor: trivet volumes and trivet doctor work with and without a running driver.
func TestVolumesAndDoctor(t *testing.T) {
	p := start(t, os.Getenv("PATH"))
	c := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
	v, err := p.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "raw\n\x1b[2J", CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 20}, VolumeCapabilities: []*csi.VolumeCapability{c},
	})
	must(t, err)
	id, staging := v.GetVolume().GetVolumeId(), t.TempDir()
	_, err = p.ctrl.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n", VolumeCapability: c})
	must(t, err)
	_, err = p.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: c})
	must(t, err)
	var list []struct {
		Pool, ID, Name, Backend, Content, Device, Problem string
		SizeBytes                                         int64
		PublishedTo                                       []string
	}
	if err := json.Unmarshal([]byte(p.run(t, "volumes", "-o", "json")), &list); err != nil || len(list) != 1 {
		t.Fatalf("got volumes %+v, error %v, want one volume", list, err)
	}
	got := list[0]
	if got.Pool != "default" || got.ID != id || got.Name != "raw\n\x1b[2J" || got.Backend != "loop" || got.Content != "block" ||
		got.SizeBytes != 1<<20 || !slices.Equal(got.PublishedTo, []string{"n"}) || !strings.HasPrefix(got.Device, "/dev/loop") || got.Problem != "" {
		t.Errorf("got %+v, want the published raw volume %s", got, id)
	}
	if out := p.run(t, "volumes"); strings.Count(out, "\n") != 2 || strings.Contains(out, "\x1b") || !strings.Contains(out, id) {
		t.Errorf("table: got %q, want two lines without escape sequences, with %s", out, id)
	}
	if out := p.run(t, "volumes", "-o", "wide"); !strings.Contains(out, "BACKEND") || !strings.Contains(out, "loop") {
		t.Errorf("wide table: got %s, want the backend loop", out)
	}
	if out := p.run(t, "volumes", "-o", "yaml"); !strings.Contains(out, "id: "+id) {
		t.Errorf("YAML: got %s, want %s", out, id)
	}
	if out := p.run(t, "doctor", "--endpoint", p.endpoint, "-o", "json"); !strings.Contains(out, `"result": "ok"`) || !strings.Contains(out, "csi.trivet.dev v1.2.3") {
		t.Errorf("doctor: got %s, want the driver csi.trivet.dev v1.2.3", out)
	}
	if _, err := p.node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		t.Error(err)
	}
	must(t, errors.Join(p.cmd.Process.Kill(), ignoreExit(p.cmd.Wait())))
	if out := p.run(t, "volumes"); !strings.Contains(out, id) || strings.Contains(out, "/dev/loop") {
		t.Errorf("volumes without the driver: got %s, want %s without a device", out, id)
	}
	if out := p.run(t, "doctor", "--endpoint", "unix:///nowhere"); !strings.Contains(out, "no driver runs there") {
		t.Errorf("doctor without the driver: got %s, want that no driver runs", out)
	}
	images, err := filepath.Glob(filepath.Join(p.state, "pools/default/volumes/*", pool.ImageFile))
	if err != nil || len(images) != 1 {
		t.Fatalf("got images %q, %v; want one", images, err)
	}
	must(t, os.Rename(images[0], images[0]+".away"))
	p = startWith(t, os.Getenv("PATH"), p.config, p.state)
	for deadline := time.Now().Add(20 * time.Second); ; { // the driver examines its volumes when it has started
		// The exit status is 1, because the image is also a problem of the pool.
		out, _ := exec.Command(program, "volumes", "--config", p.config, "--state-dir", p.state, "--endpoint", p.endpoint).Output()
		if strings.Contains(string(out), "DATA_LOSS ImageMissing") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("volumes: got %s, want the health of the volume without an image", out)
		}
	}
	must(t, os.Rename(images[0]+".away", images[0]))
}

// TestVolumesElsewhere: trivet volumes lists directories and whole disks. It also lists directories after their
// filesystem was mounted at another path, with another state directory, as on another node.
func TestVolumesElsewhere(t *testing.T) {
	disk, _, _ := testenv.Disk(t, 1<<30)
	first, second := testenv.SimpleQuotas(t, "2G"), t.TempDir()
	p := startWith(t, os.Getenv("PATH"), poolsAt(t, first, "- {name: disks, disks: {match: ["+disk+"]}}\n"), t.TempDir())
	directory := p.createOn(t, map[string]string{"backend": "local", "pool": "fast", "subDir": "team/a"})
	wholeDisk := p.createOn(t, map[string]string{"backend": "disk", "pool": "disks"})
	testenv.Run(t, "dd", "if=/dev/zero", "of="+first+"/pool/team/a/file", "bs=1M", "count=16", "conv=fsync", "status=none")
	all := p.list(t)
	wantDirectory(t, all, directory)
	got := all[wholeDisk]
	size := got.SizeBytes // the size of the disk without the partition table
	want := listed{Pool: "disks", ID: wholeDisk, Name: "disks", Backend: "disk", Content: "ext4", Device: disk, SizeBytes: size, UsedBytes: size}
	if len(all) != 2 || got != want || size <= 1<<30-8<<20 || size >= 1<<30 {
		t.Errorf("got %d volumes, and of the disk %+v, want 2 and %+v", len(all), got, want)
	}
	must(t, errors.Join(p.cmd.Process.Kill(), ignoreExit(p.cmd.Wait())))
	testenv.Run(t, "mount", "--bind", first, second)
	t.Cleanup(func() { testenv.Run(t, "umount", second) })
	p.config, p.state = poolsAt(t, second, ""), t.TempDir()
	if all = p.list(t); len(all) != 1 {
		t.Errorf("after the move: got %+v, want one volume", all)
	}
	wantDirectory(t, all, directory)
}

// poolsAt writes a configuration with a pool on a filesystem, and with the pools in more. It returns the path.
func poolsAt(t *testing.T, filesystem, more string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(path, []byte("pools:\n- {name: fast, directory: {path: "+filesystem+"/pool}}\n"+more), 0o600))
	return path
}

func mountCapability(fsType string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
	}
}

// createOn creates a volume of at least 64 MiB, whose name is that of its pool. It returns the ID.
func (p *process) createOn(t *testing.T, parameters map[string]string) string {
	t.Helper()
	v, err := p.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: parameters["pool"], CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, Parameters: parameters,
		VolumeCapabilities: []*csi.VolumeCapability{mountCapability("")},
	})
	must(t, err)
	return v.GetVolume().GetVolumeId()
}

// listed is a volume in the output of trivet volumes.
type listed struct {
	Pool, ID, Name, Backend, Content, SubDir, Device, Problem string
	SizeBytes, UsedBytes                                      int64
}

// list returns the output of trivet volumes by ID.
func (p *process) list(t *testing.T) map[string]listed {
	t.Helper()
	var all []listed
	must(t, json.Unmarshal([]byte(p.run(t, "volumes", "-o", "json")), &all))
	byID := map[string]listed{}
	for _, v := range all {
		byID[v.ID] = v
	}
	return byID
}

// wantDirectory fails the test unless a volume is the directory team/a of 64 MiB with a file of 16 MiB.
func wantDirectory(t *testing.T, all map[string]listed, id string) {
	t.Helper()
	got := all[id]
	used := got.UsedBytes
	want := listed{Pool: "fast", ID: id, Name: "fast", Backend: "local", Content: "directory", SubDir: "team/a", SizeBytes: 64 << 20, UsedBytes: used}
	if got != want || used < 16<<20 || used > 17<<20 {
		t.Errorf("got %+v, want %+v with 16 MiB used", got, want)
	}
}

// ignoreExit returns nil for the exit status of a process, and other errors unchanged.
func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
