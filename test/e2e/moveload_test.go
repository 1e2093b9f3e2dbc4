//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"testing"
	"time"
)

// database is a StatefulSet whose pod writes like a database: a block of the file hot, and then a record of it in the log, each
// durable before the next one. Block i modulo the number of blocks contains the number i, so that the log tells what each block
// must contain. When the pod starts, it verifies this. The file cold is never written again. The values are the sizes of both
// files in MiB, and that of the volume in GiB.
const database = `
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: log}
spec:
  serviceName: log
  replicas: 1
  selector: {matchLabels: {app: log}}
  template:
    metadata: {labels: {app: log}}
    spec:
      terminationGracePeriodSeconds: 10
      containers:
      - name: c
        image: docker.io/library/busybox:1.37
        command:
        - sh
        - -c
        - |
          blocks=%[1]d
          block() { yes "$1" | head -c 1048576; }
          cd /data
          if [ ! -e cold ]; then
            dd if=/dev/urandom of=new bs=1M count=%[2]d && sync new && mv new cold
          fi
          i=$(cat log 2>/dev/null | wc -l)
          b=0
          while [ $b -lt $blocks ] && [ $b -lt $i ]; do
            last=$((i - 1 - (i - 1 - b) %% blocks))
            if ! block $last | cmp -s -n 1048576 - hot 0 $((b * 1048576)); then
              echo "block $b of hot does not contain the number $last, which is the last one in the log"
              exit 1
            fi
            b=$((b + 1))
          done
          touch /tmp/verified
          trap 'stop=1' TERM
          while [ -z "$stop" ] && block $i | dd of=hot bs=1M seek=$((i %% blocks)) conv=notrunc,fsync iflag=fullblock 2>/dev/null &&
              record="$i $(cut -d' ' -f1 /proc/uptime)" && echo "$record" >>log && sync log; do
            echo "$record"
            [ $i -lt $blocks ] || sleep 0.1
            i=$((i + 1))
          done
        readinessProbe: {exec: {command: [cat, /tmp/verified]}, periodSeconds: 1}
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data, labels: {kept: "yes"}}
    spec:
      storageClassName: trivet-loop
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: %[3]dGi}}
`

// TestMoveUnderLoad moves the volume of a pod that writes several MiB/s, of which 5 % of the data are changed, to and fro.
func TestMoveUnderLoad(t *testing.T) {
	data := cmp.Or(*moveData<<10, *moveSize<<10*9/10)
	hot := data / 20
	m := startMoving(t, fmt.Sprintf(database, hot, data-hot, *moveSize), "--set", fmt.Sprintf("attachRequired=%t", *moveAttach))
	eventually(t, 10*time.Minute, "all blocks are written", func() (string, bool) {
		n := len(m.records(t))
		return fmt.Sprintf("%d of %d", n, hot), n > hot
	})
	sum := func() string {
		return kubectl(t, "-n", m.ns, "exec", "log-0", "--", "md5sum", "/data/cold")
	}
	before := sum()
	for range *moves {
		other, _ := m.elsewhere(t)
		m.mustMove(t, other)
	}
	if after := sum(); after != before {
		t.Errorf("got the checksum %s of the file that nobody writes, want %s", after, before)
	}
}
