package doctor

import (
	"crypto/x509"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// TestJudgeDriver judges the possible answers of a driver.
func TestJudgeDriver(t *testing.T) {
	o := Options{Endpoint: "unix:///csi/csi.sock", DriverName: "d", Version: "v1"}
	inCluster := o
	inCluster.Pod.InCluster = true
	for name, tc := range map[string]struct {
		facts  driverFacts
		o      Options
		result Result
		says   string
	}{
		"ready":               {driverFacts{name: "d", version: "v1", ready: true}, o, OK, "d v1"},
		"opening its pools":   {driverFacts{name: "d", version: "v1"}, o, Failure, "opening"},
		"Probe fails":         {driverFacts{name: "d", version: "v1", err: errors.New("disk failed")}, o, Failure, "disk failed"},
		"no socket":           {driverFacts{err: fs.ErrNotExist}, o, Warning, "/csi/csi.sock"},
		"no socket, in a pod": {driverFacts{err: fs.ErrNotExist}, inCluster, Failure, "/csi/csi.sock"},
		"no answer":           {driverFacts{err: errors.New("refused")}, o, Failure, "refused"},
		"another name":        {driverFacts{name: "x", version: "v1", ready: true}, o, Failure, "the expected name is d"},
		"another version":     {driverFacts{name: "d", version: "v2", ready: true}, o, Warning, "this program is v1"},
	} {
		expect(t, name, judgeDriver(tc.facts, tc.o), tc.result, tc.says)
	}
}

// TestRunningDriver checks a running driver and its pools: one is open, one was lost after the start, and one is
// unknown to the driver.
func TestRunningDriver(t *testing.T) {
	// The driver opens the pools default and lost. Then the directory of lost is replaced, and the pool added
	// is added to the configuration.
	dir := t.TempDir()
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + state + "/csi.sock", NodeID: "n", StateDir: state, Name: "csi.trivet.dev", Version: "test",
		Services: []string{"controller", "node"}, Kinds: backend.Kinds{loop.Kind},
		Config: driver.Config{MaxVolumesPerNode: 1, Pools: []pool.Config{
			{Name: "default", Directory: pool.Directory{Path: dir + "/default"}}, {Name: "lost", Directory: pool.Directory{Path: dir + "/lost"}},
		}},
	})
	config := filepath.Join(dir, "config.yaml")
	must(t, os.WriteFile(config, []byte("pools:\n- {name: default, directory: {path: "+dir+"/default}}\n- {name: lost, directory: {path: "+dir+"/lost}}\n- {name: added, directory: {path: "+dir+"/added}}\n"), 0o600))
	must(t, os.Rename(dir+"/lost", dir+"/moved"))
	must(t, os.Mkdir(dir+"/lost", 0o700))
	checks := Run(t.Context(), Options{ConfigPath: config, StateDir: d.Options.StateDir, Endpoint: d.Options.Endpoint, Version: "test", Patience: time.Minute})
	expect(t, "driver", find(t, checks, "driver"), OK, "csi.trivet.dev test")
	expect(t, "a pool", find(t, checks, "pool default, served"), OK, "open")
	expect(t, "a lost pool", find(t, checks, "pool lost"), Failure, "is its disk mounted?")
	expect(t, "a lost pool, served", find(t, checks, "pool lost, served"), Failure, "is no longer the directory that the driver opened")
	expect(t, "an unknown pool", find(t, checks, "pool added"), Warning, "does not exist")
	expect(t, "an unknown pool, served", find(t, checks, "pool added, served"), Failure, "does not have this pool")
	expect(t, "state directory", find(t, checks, "state directory"), OK, d.Options.StateDir)
	expect(t, "kubernetes", find(t, checks, "kubernetes"), Skipped, "not in a pod")
}

// TestForwarding checks the drivers of a node and of the controller: first without a fault, then after the node
// has stopped, and then with wrong certificates.
func TestForwarding(t *testing.T) {
	dir := t.TempDir()
	c := backendtest.StartCluster(t, []string{dir + "/pool"}, loop.Kind)
	node, router := c.Nodes[0].Options, c.Router.Options
	check := func(o driver.Options, config string) []Check {
		path := filepath.Join(o.StateDir, "config.yaml")
		must(t, os.WriteFile(path, []byte(config), 0o600))
		return Run(t.Context(), Options{ConfigPath: path, StateDir: o.StateDir, Endpoint: o.Endpoint, Version: "test", Patience: time.Minute})
	}
	nodeConfig := "pools:\n- {name: default, directory: {path: " + dir + "/pool}}\n- {name: other, directory: {path: " + dir + "/other}}\nforwarding: {listen: 127.0.0.1:1}\n"
	routerConfig := "forwarding: {nodes: [{name: " + node.NodeID + ", address: " + node.Config.Forwarding.Listen + "}]}\n"

	checks := check(node, nodeConfig)
	expect(t, "a pool of the node", find(t, checks, "pool default, served"), OK, "open")
	expect(t, "an unknown pool", find(t, checks, "pool other, served"), Failure, "does not have this pool")
	expect(t, "the node's certificates", find(t, checks, "certificates"), OK, "valid")
	find(t, checks, "kernel") // the doctor of a node also checks the kernel
	checks = check(router, routerConfig)
	expect(t, "the controller's nodes", find(t, checks, "nodes"), OK, "all")
	expect(t, "the controller's certificates", find(t, checks, "certificates"), OK, "valid")
	for _, c := range checks {
		if c.Name == "kernel" {
			t.Error("the doctor of the controller checked the kernel of its node")
		}
	}

	must(t, os.Rename(dir+"/pool", dir+"/away"))
	expect(t, "a lost pool", find(t, check(node, nodeConfig), "pool default, served"), Failure, dir+"/pool: no such file")
	c.Nodes[0].Stop(t)
	var nodes Check
	for nodes.Result != Failure { // until the controller has detected that the node does not answer
		nodes = find(t, check(router, routerConfig), "nodes")
	}
	expect(t, "a stopped node", nodes, Failure, node.NodeID)
	c.Certify(t, router.StateDir+"/certificates", pki.NodeURI(backendtest.DriverName, "x"), x509.ExtKeyUsageServerAuth)
	expect(t, "the certificate of a node", find(t, check(router, routerConfig), "certificates"), Failure, "/node/x, expected")
	must(t, os.Remove(router.StateDir+"/certificates/ca.crt"))
	expect(t, "no CA certificate", find(t, check(router, routerConfig), "certificates"), Failure, "ca.crt")
}

// TestForwardedNFSPool: the doctor does not query the driver of a node for nfs pools, which the driver of
// the controller serves.
func TestForwardedNFSPool(t *testing.T) {
	dir := t.TempDir()
	node := backendtest.StartCluster(t, []string{dir + "/pool"}, loop.Kind).Nodes[0].Options
	config, err := driver.ParseConfig([]byte("pools:\n- {name: default, directory: {path: "+dir+"/pool}}\n- {name: shared, nfs: {server: 127.0.0.1, export: /x}}\nforwarding: {listen: 127.0.0.1:1}\n"), backend.Kinds{loop.Kind})
	must(t, err)
	f := readDriver(t.Context(), Options{Endpoint: node.Endpoint}, config)
	if err, queried := f.pools["default"]; err != nil || !queried {
		t.Errorf("pool default: got error %v, queried %t, want nil, true", err, queried)
	}
	if err, queried := f.pools["shared"]; queried {
		t.Errorf("the nfs pool was queried, with error %v", err)
	}
}

// TestNoListener: readDriver returns an error if the socket is missing or nothing listens on it.
func TestNoListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	if f := readDriver(t.Context(), Options{Endpoint: "unix://" + path}, driver.Config{}); !errors.Is(f.err, fs.ErrNotExist) {
		t.Errorf("no socket: got %+v, want fs.ErrNotExist", f)
	}
	l, err := net.Listen("unix", path)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
	if f := readDriver(t.Context(), Options{Endpoint: "unix://" + path}, driver.Config{}); f.err == nil || f.name != "" {
		t.Errorf("a socket without a listener: got %+v, want an error and no name", f)
	}
}

// TestBadConfiguration: a configuration file that cannot be read is a failure of the check configuration.
func TestBadConfiguration(t *testing.T) {
	checks := Run(t.Context(), Options{ConfigPath: "/nowhere.yaml", StateDir: t.TempDir(), Endpoint: "unix:///nowhere", Patience: time.Minute})
	expect(t, "configuration", find(t, checks, "configuration"), Failure, "/nowhere.yaml")
}

// TestHungState: if reads in the state directory hang, the checks of that directory and of the pools fail, and the
// other checks run.
func TestHungState(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/known-pools", 0o700))
	fifo := dir + "/known-pools/default"
	must(t, syscall.Mkfifo(fifo, 0o600))
	t.Cleanup(func() { // ends the reads that hang
		f, err := os.OpenFile(fifo, os.O_RDWR, 0)
		must(t, err)
		must(t, f.Close())
	})
	must(t, os.MkdirAll(dir+"/pools/default", 0o700))
	checks := Run(t.Context(), Options{StateDir: dir, Endpoint: "unix:///nowhere", Patience: time.Second})
	expect(t, "state directory", find(t, checks, "state directory"), Failure, "no answer within 1s")
	expect(t, "pool", find(t, checks, "pool default"), Failure, "no answer within 1s")
	expect(t, "driver", find(t, checks, "driver"), Warning, "no driver")
}

// TestWithin: a check that hangs becomes a failure; other checks keep their result.
func TestWithin(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	checks := checkWithin(10*time.Millisecond, "pool p", func() []Check { <-release; return nil })
	expect(t, "hanging", checks[0], Failure, "no answer")
	checks = checkWithin(time.Minute, "pool p", func() []Check { return []Check{ok("pool p", "fine")} })
	expect(t, "answering", checks[0], OK, "fine")
}
