package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/test/measure"
)

// database is PostgreSQL, which runs as the user nobody. Only one server runs at a time.
type database struct {
	testbed  *testbed
	programs string // the directory of its programs
	sockets  string // the directory of its socket
	scale    int    // of pgbench; 15 MiB each
	seconds  int    // of a measurement
}

// databaseUser is the numeric ID of the user nobody.
const databaseUser = 65534

// postgresPrograms returns the directory of the programs of PostgreSQL, or an empty string if it is not installed. On
// Debian they are not in PATH.
func postgresPrograms() string {
	all, _ := filepath.Glob("/usr/lib/postgresql/*/bin") // the pattern is valid
	if len(all) > 0 {
		return all[len(all)-1]
	}
	if path, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(path)
	}
	return ""
}

// newDatabase prepares the testbed for databases.
func newDatabase(g *testbed, o options) *database {
	d := &database{g, o.postgres, filepath.Join(g.Dir, "sockets"), 10, max(1, int(o.duration.Seconds()))}
	if o.quick {
		d.scale = 1
	}
	measure.Must(os.Mkdir(d.sockets, 0o755))
	measure.Must(os.Chown(d.sockets, databaseUser, databaseUser))
	return d
}

// data returns the directory of the data of the database in a place.
func (d *database) data(p *place) string { return filepath.Join(p.dir, "database") }

// unprivileged returns the arguments of setpriv(1) that start a program of PostgreSQL, which refuses to run as root. The
// capability lets it enter directories above that of its data, which only root can enter.
func (d *database) unprivileged(name string, args ...string) []string {
	return append([]string{
		"--reuid=nobody", "--regid=" + strconv.Itoa(databaseUser), "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
		filepath.Join(d.programs, name),
	}, args...)
}

// create creates a database in a place.
func (d *database) create(ctx context.Context, p *place) {
	data := d.data(p)
	measure.Must(os.Mkdir(data, 0o700))
	measure.Must(os.Chown(data, databaseUser, databaseUser))
	measure.Must(measure.Command(ctx, "setpriv", d.unprivileged("initdb", "--auth=trust", "--username=postgres", "--no-locale", "--pgdata="+data)...))
	d.serve(ctx, p, func() { d.pgbench(ctx, "--initialize", "--quiet", "--scale="+strconv.Itoa(d.scale)) })
}

// serve calls do while the server of the database in a place runs.
func (d *database) serve(ctx context.Context, p *place, do func()) {
	s := d.testbed.Launch("postgres", "setpriv", d.unprivileged("postgres", "-D", d.data(p), "-k", d.sockets, "-c", "listen_addresses=")...)
	// The server also ends when the benchmark is interrupted, because it keeps the volume in use.
	defer func() { measure.Must(s.Stop()) }()
	measure.Must(s.Await(ctx, "PostgreSQL", 10*time.Millisecond, startTimeout, func() bool {
		return measure.Command(ctx, filepath.Join(d.programs, "pg_isready"), "--host="+d.sockets) == nil
	}))
	do()
}

// pgbench runs pgbench(1) and returns its output.
func (d *database) pgbench(ctx context.Context, args ...string) string {
	out, err := exec.CommandContext(ctx, filepath.Join(d.programs, "pgbench"), append(args, "--host="+d.sockets, "--username=postgres", "postgres")...).CombinedOutput()
	if err != nil {
		measure.Must(fmt.Errorf("pgbench: %w: %s", err, out))
	}
	return string(out)
}

// load returns the load of four clients that make the transactions of pgbench.
func (d *database) load() load {
	return load{"pgbench, 4 clients", []figure{transactions}, "", func(ctx context.Context, m meter, p *place) (o *outcome) {
		d.serve(ctx, p, func() {
			var out string
			cpu := m.during(ctx, 0, func() {
				out = d.pgbench(ctx, "--client=4", "--jobs=2", "--no-vacuum", "--time="+strconv.Itoa(d.seconds))
			})
			var err error
			if o, err = parsePgbench(out); err != nil {
				measure.Must(fmt.Errorf("pgbench in %s: %w", p.name, err))
			}
			o.cpu = cpu
		})
		return o
	}}
}

// parsePgbench reads the output of pgbench.
func parsePgbench(out string) (*outcome, error) {
	o := &outcome{}
	for line := range strings.Lines(out) {
		if text, ok := strings.CutPrefix(line, "number of transactions actually processed: "); ok {
			o.operations, _ = strconv.ParseInt(strings.TrimSpace(text), 10, 64)
		}
		if text, ok := strings.CutPrefix(line, "tps = "); ok {
			o.rate, _ = strconv.ParseFloat(strings.Fields(text)[0], 64)
		}
	}
	if o.operations == 0 || o.rate == 0 {
		return nil, fmt.Errorf("output of pgbench without transactions: %s", out)
	}
	return o, nil
}
