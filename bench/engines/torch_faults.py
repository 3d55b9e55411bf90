"""Faults of what every engine stands on: command line, hub, PyTorch, CUDA, NCCL, Triton, compilers, operating system.

Knobs are named by what they do (``memory``, ``running``, ...); each engine says what its option is called. Messages are
those of PyTorch 2.0 to 2.11, CUDA 11 to 13, NCCL 2.18 to 2.28, Triton 2 and 3, huggingface_hub 0.2 to 1, transformers 4
and 5, and the Linux kernel. The order matters: what names its cause comes before what could have many.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.faults import Direction, Rank, Rule, any_of
from bench.outcome import Cause

# Exceptions that refuse something on purpose; the others are raised by a bug.
_REFUSES = r"^(?:[\w.]+\.)?(?:ValueError|AssertionError|NotImplementedError|RuntimeError|Exception|VLLM\w*Error)\b"
_BREAKS = r"^(?:[\w.]+\.)?(?:\w*Error|Exception)\b"

_COMMAND_LINE = (
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        r"error: argument \S+: not allowed with argument",
        plain=True,
        fatal=True,
        startup=True,
    ),
    Rule(
        Cause.UNKNOWN_ARGUMENT,
        any_of(r"""
            error: (?:unrecognized arguments|ambiguous option|argument [^:]+: |unknown option|unrecognized option)
            error: the following arguments are required
            ^(?:Error: )?No such option
            Got unexpected extra argument
        """),
        plain=True,
        fatal=True,
        startup=True,
    ),
    Rule(
        Cause.UNKNOWN_ARGUMENT,
        any_of(r"""
            (?:ServerArgs|EngineArgs)\S* got an unexpected keyword
            (?:unknown|unrecognized) (?:argument|option|flag|speculative algorithm|\w+ parser)
            (?:unknown|invalid|unrecognized) (?:quantization|attention|load.?format)
            invalid (?:tool call|reasoning)[ _-]*parser
        """),
        startup=True,
    ),
)

_SYSTEM = (
    Rule(Cause.NCCL, r"nccl.*/dev/shm|/dev/shm/nccl", rank=Rank.SUSPECT, plain=True),
    Rule(
        Cause.OOM_HOST,
        any_of(r"""
            /dev/shm.*No space left
            No space left.*/dev/shm
            insufficient shared memory
        """),
        plain=True,
        advice="Shared memory ran out: give the container more (--shm-size or --ipc=host).",
    ),
    Rule(
        Cause.DISK_FULL,
        any_of(r"""
            No space left on device
            Disk quota exceeded
            \bENOSPC\b
            \[Errno (?:28|122)\]
            os error 28
            disk (?:is )?full
        """),
        plain=True,
    ),
    Rule(Cause.DISK_FULL, r"not enough (?:free )?disk space", rank=Rank.SUSPECT, plain=True),
    Rule(Cause.PORT_IN_USE, r"error while attempting to bind on address.*in use", plain=True, fatal=True),
    Rule(
        Cause.PORT_IN_USE,
        any_of(r"""
            EADDRINUSE
            \[Errno (?:98|48)\]
            code: -98
            address already in use
            port \S* ?(?:is|was) (?:already |currently )?(?:in use|occupied|allocated|taken|unavailable|not available)
            No available port
        """),
    ),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        r"cannot assign requested address|\[Errno 99\]",
        moves=(("host", "change"),),
        advice="The address to listen on does not belong to this machine.",
    ),
    Rule(
        Cause.PERMISSION,
        any_of(r"""
            PermissionError
            \[Errno (?:13|30)\]
            \[Errno 1\] Operation not permitted
            Read-only file system
            os error 13
            Insufficient Permissions
            permission denied
        """),
    ),
    Rule(
        Cause.OOM_HOST,
        any_of(r"""
            Out of memory: Kill(?:ed)? process
            oom-kill
            OOMKilled(?!["']?: ?false)
            oom_(?:reaper|kill)
            memory cgroup out of memory
            exceeded (?:its )?memory limit
        """),
        plain=True,
        fatal=True,
    ),
    Rule(
        Cause.OOM_HOST,
        any_of(r"""
            not enough (?:host|cpu|system|pinned) memory
            DefaultCPUAllocator
            alloc_cpu\.cpp
            ^MemoryError
            ArrayMemoryError
            Cannot allocate memory
            \[Errno 12\]
            os error 12
            bad_alloc
            No host memory is left
            (?:pinned|host) memory allocation.*(?:fail|null)
            cudaHost(?:Alloc|Register).*(?:fail|memory)
            ray\.exceptions\.OutOfMemoryError
            ray.*(?:low on memory|memory pressure)
            too large swap space
        """),
        plain=True,
    ),
)

_GPU_MEMORY = (
    Rule(
        Cause.GPU_BUSY,
        any_of(r"""
            memory capacity is unbalanced
            free memory on device.*less than desired
            error in memory profiling
            initial free memory .* current free memory
            devices?(?:\(s\))? (?:is|are|is/are) busy
        """),
    ),
    # A kernel's own memory, not the GPU's; compilers print it while they tune, and go on.
    Rule(
        Cause.UNSUPPORTED_HARDWARE,
        any_of(r"""
            out of resources?: (?:shared memory|threads|tensor memory)
            OutOfResources
            Hardware limit: \d+
        """),
        moves=(("attention", "change"),),
        advice="A kernel needs more shared memory than this GPU has: another backend, or smaller heads or blocks.",
    ),
    Rule(
        Cause.OOM_GPU_RUNTIME,
        any_of(r"""
            (?:CUDA|HIP|NPU|XPU|MUSA|GPU|device|driver)\b.{0,30}out of memory
            OutOfMemory(?:Error)?\b
            (?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|STATUS_ALLOC_FAILED)
            (?:unable|failed) to allocate.*(?:gpu|device|cuda)
            ran out of gpu memory
        """),
        placed=True,
    ),
)

_GPU = (
    Rule(
        Cause.ILLEGAL_MEMORY_ACCESS,
        any_of(r"""
            watchdog thread terminated with exception:.*(?:illegal|misaligned|device-side|launch failure)
            ^Memory access fault by GPU
        """),
        plain=True,
        fatal=True,
    ),
    Rule(
        Cause.ILLEGAL_MEMORY_ACCESS,
        any_of(r"""
            illegal memory access
            device-side assert
            misaligned address
            unspecified launch failure
            illegal instruction was encountered
            memory access fault by GPU
            cudaError(?:IllegalAddress|Assert|MisalignedAddress|LaunchFailure)
            (?:CUDA_ERROR_ILLEGAL_ADDRESS|hipErrorIllegalAddress)
            Warp (?:Illegal|Out-of-range)
            MMU fault
            HSA_STATUS_ERROR_(?:EXCEPTION|MEMORY)
        """),
    ),
    Rule(
        Cause.ILLEGAL_MEMORY_ACCESS,
        r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion",
        rank=Rank.SUSPECT,
        plain=True,
    ),
    Rule(
        Cause.DRIVER_MISMATCH,
        any_of(r"""
            driver (?:version )?(?:on your system )?is (?:insufficient|too old)
            found no NVIDIA driver
            forward compatibility was attempted
            driver/library version mismatch
            unsatisfied condition: (?:cuda|driver|brand)
            unsupported toolchain
            UNSUPPORTED_PTX
            Error 80[2-4]:
            system not yet initialized
            cudaError(?:InsufficientDriver|CompatNotSupported|SystemDriverMismatch|SystemNotReady)
            lib(?:cuda|nvidia-ml)\.so\S*: cannot open
            driver not loaded
            NVML.*(?:not found|mismatch|initializ)
            CUDA unknown error
            requires (?:a )?(?:newer )?(?:NVIDIA |CUDA )?driver
            (?:driver|CUDA) version .*(?:too old|older than)
        """),
        plain=True,
    ),
    Rule(Cause.MISSING_DEPENDENCY, r"^(?:[\w.]+\.)?(?:ImportError|ModuleNotFoundError)\b"),
    Rule(
        Cause.UNSUPPORTED_HARDWARE,
        any_of(r"""
            no kernel image is available
            NoKernelImage
            invalid device function
            not compiled with (?:CUDA|ROCm|HIP|NPU)
            no (?:CUDA|NVIDIA) (?:GPUs?|devices?) (?:are|is|were|was)
            no CUDA-capable device
            0 active drivers
            only supports? (?:the )?(?:CUDA|NVIDIA|Hopper|Ampere|Ada|Blackwell|sm_?\d+)
            only supported on (?:\w+ )?(?:CUDA|NVIDIA|GPUs?|Hopper|Ampere|Ada|Blackwell)
            only supported on (?:\w+ )?(?:SM|sm_?\d|H100|B200|AMD|ROCm|x86)
            (?:compute|device|current|minimum) capability
            requires? (?:at least )?(?:SM ?\d|sm_?\d|SM>=|Hopper|Ampere|Ada|Blackwell|GPUs? with)
            (?:needs|requires?) (?:a )?(?:CUDA|NVIDIA)(?: (?:GPU|device)| ?\(|\.|$)
            not supported (?:on|by|for|in) (?:this|your|the current|current) (?:GPU|device|platform|hardware|arch)
            unsupported (?:GPU|device|platform|hardware|architecture|cuda arch|sm)\b
            failed to infer device type
            no (?:accelerator|supported GPU|available GPU|supported device|available device)
            no GPU (?:found|detected)
            (?:CUDA|GPU) is not available
            cutlass.*error internal
            Arch conditional MMA
            does not support (?:this|the|your) (?:GPU|device|architecture|platform|hardware)
            supports? Ampere GPUs or newer
            only SM ?\d
            sm_?\d+\w? (?:is )?not supported
            not compatible with .{0,40}(?:GPU|PyTorch installation)
            on (?:Ampere|Hopper|Ada|Blackwell|Turing|Volta)\S* (?:cards?|GPUs?)
            (?:AVX512|AMX)\b.*(?:required|not supported|needed)
        """),
    ),
)

_KERNELS = (
    Rule(
        Cause.KERNEL_BUILD,
        any_of(r"""
            ninja: (?:build stopped|error|fatal)
            ninja (?:build failed|exited)
            Error (?:building|compiling) (?:extension|objects)
            nvcc(?: fatal|: not found|: command not found| not found| failed)
            (?:find|locate|such file).*\bnvcc\b
            CUDA_HOME\b.*(?:not set|not found|does not exist|doesn't exist|undefined|set it)
            (?:CompilationError|InductorError|BackendCompilerFailed|PTXASError|CppCompileError|LLVM ERROR)
            \bptxas\b
            PTX codegen error
            NVRTC_ERROR
            nvrtc: error
            NVCC compil
            PassManager::run failed
            failed to (?:find|locate) (?:a )?C(?:\+\+)? compiler
            (?:failed to compile|compil\w+ (?:failed|error))
            fatal error: \S+\.(?:h|hpp|cuh): No such file
            /usr/bin/ld: cannot find
            (?:collect2: error|cc1plus)
            CalledProcessError.*(?:ninja|nvcc|gcc|g\+\+|cc1|cmake|clang|cicc|hipcc)
            device kernel image is invalid
            INVALID_(?:IMAGE|PTX)
            JIT (?:compil\w+|build|session).*(?:fail|error)
            failed to JIT
            failed to (?:load|download) .*cubin
            detected CUDA version .* mismatches
            (?:No such file|FileNotFoundError).*(?:\bg?cc\b|g\+\+|ninja|hipcc)
            cutlass.*cannot implement
        """),
    ),
    Rule(Cause.KERNEL_BUILD, r"(?:triton|mlir|llvm)\S*: Assertion `.*failed", rank=Rank.CRASH, plain=True, fatal=True),
)

_HUB = (
    Rule(
        Cause.MODEL_NOT_FOUND,
        any_of(r"""
            is not a local folder and is not a valid model identifier
            Repo id must
            Repository ?Not ?Found
            RevisionNotFound
            is not a valid git identifier
            does not appear to have a file named \S*(?:config\.json|model)
            Invalid repository ID or local directory
            can't load (?:the )?(?:configuration|tokenizer|config|image processor|feature extractor)
            cannot find (?:any model weights|(?:the )?model)
            no such file or directory: \S*(?:config\.json|tokenizer|\.safetensors|\.gguf|\.bin|\.index\.json)
            (?:model|path|folder|directory|checkpoint|file) \S* ?does ?n[o']t exist
            Error no file named
            no (?:safetensors|weights?|model|checkpoint|config\w*) files? (?:were )?found
            EntryNotFoundError.*config\.json
            model .{0,80}(?:not found|does not exist) (?:on|in|at) (?:the )?(?:hub|modelscope|local)
            Incorrect path_or_model_id
            404 (?:Client Error|(?:page )?not found)
            should have a `model_type` key
        """),
    ),
    Rule(
        Cause.HUB_ACCESS,
        any_of(r"""
            gated repo
            Access to model .* is restricted
            couldn't connect to
            cannot reach .*hugging
            outgoing traffic has been disabled
            offline ?mode
            cannot find the requested files
            invalid user token
            token (?:is|was) (?:invalid|expired|required)
            not authorized
            awaiting a review
            huggingface.*(?:unreachable|timed? ?out|refused)
            Consistency check failed
            failed to (?:download|fetch) (?:model|snapshot|file|repo)
        """),
    ),
    # What transformers turns into one of the above, a few lines further down.
    Rule(
        Cause.HUB_ACCESS,
        any_of(r"""
            (?:401|403|407|429|5\d\d) (?:Client|Server) Error
            (?:401|403|429|5\d\d) (?:Unauthorized|Forbidden|Too Many|Gateway|Bad)
            LocalEntryNotFound
            GatedRepoError
            HfHubHTTPError
            HTTPSConnectionPool
            NameResolutionError
            Temporary failure in name resolution
            Name or service not known
            (?:ProxyError|SSLError|SSLCertVerif|CERTIFICATE_VERIFY_FAILED)
            (?:connect|read)(?:ion)? ?timed? ?out.*(?:hugging|https)
            Network is unreachable
        """),
        rank=Rank.CRASH,
    ),
)

_DEPENDENCIES = (
    Rule(
        Cause.MISSING_DEPENDENCY,
        any_of(r"""
            does not recognize this architecture
            No module named
            cannot import name
            PackageNotFoundError
            (?:DistributionNotFound|VersionConflict)
            undefined symbol
            version `\S+' not found
            cannot open shared object file
            numpy\.(?:dtype size|core\.multiarray)
            _ARRAY_API not found
            is installed with version
            pip install
            not installed\b
            please (?:re)?install
            (?:upgrade|downgrade|update) (?:to |your )?(?:transformers|flashinfer|sgl|torch|vllm|triton)
            (?:requires|need) (?:the )?[\w-]+ ?(?:>=|==|<=|<|>|version)
            requires `?\w[\w.-]*`? to be installed
            Could not load (?:any common_ops|library)
            untagged enum ModelWrapper
            Tokenizer class \S+ does not exist
            need to have .{0,60} installed
        """),
    ),
    Rule(
        Cause.MISSING_DEPENDENCY,
        any_of(r"""
            \b(?:sglang|vllm|python\d?|uv|ray|docker): (?:command )?not found
            executable file not found
            could not select device driver
            ^\S*python[\d.]*: (?:No module named|can't open file|Error while finding module)
        """),
        plain=True,
        fatal=True,
        startup=True,
    ),
    Rule(
        Cause.MISSING_DEPENDENCY,
        any_of(r"""
            Failed to import (?:from )?\S*(?:vllm\._|sgl_kernel|flashinfer|_C)\b
            Failed to import from vllm
            Could not load\b.*common_ops
        """),
        rank=Rank.SUSPECT,
        plain=True,
    ),
)

_PEER_WENT = (
    "Another rank went away first, or cannot be reached: read the log of the rank that did, and check the network."
)
_COLLECTIVES = (
    Rule(
        Cause.NCCL,
        any_of(r"""
            (?:connection )?(?:closed|reset|aborted) by peer
            broken pipe
            socket closed
            stopped due to .*(?:peer|other rank)
            peer.*(?:closed|gone|died)
        """),
        where=r"distributed|broadcast|all_reduce|all_gather|nccl|recv_req|process_group|parallel_state|barrier|transfer",
        rank=Rank.CONSEQUENCE,
        advice=_PEER_WENT,
    ),
    Rule(
        Cause.NCCL,
        any_of(r"""
            gloo.*(?:closed by peer|reset by peer|timed? ?out|connect)
            remote process exited
            ncclRemoteError
            monitoredBarrier
        """),
        rank=Rank.CONSEQUENCE,
        advice=_PEER_WENT,
    ),
    Rule(
        Cause.NCCL,
        any_of(r"""
            nccl ?error
            \bnccl(?:Unhandled|System|Internal|Invalid)\w*
            Dist(?:Backend|Network|Store)Error
            NCCL.{0,60}(?:fail|error|timed? ?out|abort)
            client socket has (?:timed out|failed)
            TCPStore
            unhandled (?:cuda|system) error
            (?:NVSHMEM|HCCL).*(?:fail|error|abort|timeout)
            rendezvous
            (?:mooncake|nixl|transfer engine|deep_?ep).{0,80}(?:fail|error|timed? ?out)
            (?:UCX|ibv_|libfabric|infiniband|rdma).{0,80}(?:fail|error|timed? ?out)
            NIXL_ERR
            socket timeout
            init_process_group.*(?:fail|time)
            peer access is not supported
            heartbeat monitor timed out
            connectFullMesh
            ProcessGroup(?:NCCL|Gloo).*(?:timeout|abort|fail)
        """),
    ),
    Rule(Cause.NCCL, r"Watchdog caught collective operation timeout", plain=True, fatal=True),
    Rule(
        Cause.NCCL, r"NOT connected to|failed to connect to .{0,60}(?:store|rank|master)", rank=Rank.SUSPECT, plain=True
    ),
    Rule(Cause.NCCL, r"NCCL WARN (?!.*(?:deprecat|NCCL_\w+ set))", rank=Rank.CONSEQUENCE, plain=True),
)

_CHECKPOINT = (
    Rule(
        Cause.WEIGHTS_MISMATCH,
        any_of(r"""
            KeyError: ['"][\w.]+\.(?:q?weight\w*|bias|\w*scales?\w*|qzeros|g_idx|A_log|dt_bias|embed\w*)['"]
            loading state_dict
            size mismatch for
            weights? (?:are|were|was|is) not (?:initialized|found|loaded)
            (?:trying|tried|attempt\w*|failed|unable) to load .*weight
            exceeds dimension size
            no module or parameter named
            (?:missing|unexpected) key
            shape mismatch.*(?:weight|param)
            (?:weight|param\w*) shape
            SafetensorError
            safetensors.*(?:invalid|corrupt|deserializ|header)
            loaded_weight
            param\w*\.(?:size|shape|data).*==.*weight
            (?:checkpoint|weights?) (?:is|are|file)? ?(?:corrupt|incomplete|truncated|do not match)
            not found in (?:the )?(?:checkpoint|params_dict)
            PytorchStreamReader
            invalid load key
            unpickling
            missing (?:weight|tensor|scale)s?\b
            not a valid JSON file
        """),
    ),
    Rule(
        Cause.WEIGHTS_MISMATCH,
        _BREAKS,
        where=any_of(r"""
            :\w*weight_loader\w*:
            :load_weights?\w*:
            :_?load_\w*(?:weight|w13|w2|qkv|column|row|merged)\w*:
            :_load_module:
            :(?:safetensors|pt)_weights_iterator:
        """),
        depth=4,
    ),
)

_PROCESSES = (
    Rule(
        Cause.WATCHDOG_TIMEOUT,
        r"watchdog timeout(?!.*soft=True)|watchdog (?:timer )?(?:expired|triggered|fired)",
        plain=True,
        fatal=True,
        moves=(("watchdog", "raise"),),
    ),
    Rule(Cause.WATCHDOG_TIMEOUT, r"RPC call to \w+ timed out|(?:execute_model|sample_tokens).* timed out"),
    Rule(
        Cause.ENGINE_CRASH,
        any_of(r"""
            Segmentation fault
            Fatal Python error
            \(core dumped\)
            SIG(?:SEGV|ABRT|BUS|FPE)
            free\(\): invalid
            double free
            corrupted size
            stack smashing
            \bBus error\b
            Floating point exception
            exit ?code:? (?:-11|-6|-7|-8|-4|139|134|135)\b
            \S+:\d+: .*Assertion `.*' failed\.?\s*$
        """),
        rank=Rank.CRASH,
        plain=True,
        fatal=True,
    ),
    Rule(
        Cause.OTHER,
        r"KeyboardInterrupt|received SIGINT|^Terminated\b|signal 15\b|exit ?code:? (?:-15|143)\b",
        rank=Rank.SUSPECT,
        plain=True,
        advice="Stopped before it was ready, by a person or by a supervisor whose patience was shorter than the start.",
    ),
    Rule(
        Cause.OOM_HOST,
        any_of(r"""
            exit ?code[:=]? ?(?:-9|9|137)\b
            exited (?:with code |\()137
            ^Killed\b
            line \d+: +\d+ Killed\b
            SIGKILL
            signal(?: 9\b|: killed)
        """),
        rank=Rank.SUSPECT,
        exit_code=True,
        plain=True,
        advice="Killed from outside without a word of its own: most often by the kernel for want of host memory (dmesg "
        "tells), else by a supervisor.",
    ),
    Rule(
        Cause.STARTUP_HANG,
        any_of(r"""
            (?:failed|fails) to (?:start|become ready|come up|respond).{0,40}(?:within|in time|before|after)
            (?:did not|didn't) (?:start|become ready|come up|respond)
            (?:startup|start-up|readiness|liveness|launch)\w* (?:probe )?(?:failed|timed? ?out|timeout)
            timed? ?out (?:while )?waiting for
            timeout waiting
            no available shared memory broadcast block
            Did not receive response from front-?end
            waiting for \d+ local, \d+ remote core engine
        """),
        rank=Rank.CONSEQUENCE,
        plain=True,
    ),
    Rule(
        Cause.ENGINE_CRASH,
        r"EOFError|BrokenPipeError|Connection(?:Refused|Reset)Error|ChildFailedError|zmq\.error|SystemExit"
        r"|HTTPConnectionPool|CancelledError",
        rank=Rank.CONSEQUENCE,
    ),
)

_CONFIG = (
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        any_of(r"""
            invalid device ordinal
            world size .* (?:larger|greater) than
            not enough (?:gpus|devices)
            (?:visible|available) (?:gpus|devices).*(?:less|fewer)
        """),
        startup=True,
        moves=(("tensor_parallel", "lower"),),
        advice="More GPUs were asked for than there are.",
    ),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        r"trust_remote_code|custom code which must be executed",
        startup=True,
        moves=(("trust", "set"),),
    ),
    Rule(Cause.CONFIG_INCOMPATIBLE, r"validation errors? for \w+", startup=True, next_line=True),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        any_of(r"""
            not (?:yet |currently )?(?:supported|compatible|implemented|divisible)\b
            not support\b
            incompatible
            (?:does|do) ?n[o']t (?:yet |currently )?support
            only (?:be )?(?:supports?|supported|used with|compatible)
            (?:is|are) disabled
            unsupported
            must (?:be (?:divisible|a multiple|set|one of|specified)|have the same (?!size)|also)
            divisible by
            mutually exclusive
            cannot (?:be|both|use|enable|find the config file)
            can only be
            requires? (?:--|setting|that|the)
            please (?:set|use|specify|disable|enable)
            failed to be inspected
            (?:greater|larger) than (?:the derived|max)
            quantization method
            does not match
        """),
        raised=_REFUSES,
        startup=True,
    ),
    # Raised by the code that checks arguments, whatever it says; asserts there are often bare.
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        raised=_REFUSES,
        where=any_of(r"""
            server_args\.py
            arg_groups/
            _hook\.py
            arg_utils\.py
            vllm/config
            configs/\w+\.py
            validation\w*\.py
            :check_server_args:
            :__post_init__:
            speculative/spec_info
            platforms/\w+\.py:(?:check_and_update|verify)
        """),
        depth=1,
        startup=True,
    ),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        any_of(r"""
            assert .*(?:tp|ep|dp|pp|attn_tp|moe_tp|tensor_parallel|world)_(?:size|rank)
            assert .*num_\w*(?:heads|experts)
            assert .*(?:page|block|chunk\w*|group)_size
            assert .* % \S+ == 0
        """),
        startup=True,
    ),
)

# What only the place in the code tells.
_PLACES = (
    Rule(
        Cause.MISSING_DEPENDENCY,
        raised=r"^(?:KeyError|ValueError)\b",
        where=r"transformers/models/auto/",
        depth=1,
        rank=Rank.CRASH,
    ),
    Rule(
        Cause.KERNEL_BUILD,
        raised=_BREAKS,
        where=any_of(r"""
            triton/(?:compiler|backends|runtime/(?:build|driver|jit))
            torch/_inductor/(?!runtime/triton_heuristics\.py:run)
            torch/utils/cpp_extension
            flashinfer/jit
            deep_gemm.*(?:jit|compile)
            tvm_ffi/cpp
            cutlass/(?:base_dsl|cutlass_dsl)
            tilelang/(?:jit|engine|compiler)
            jit_kernel/utils
        """),
        depth=3,
    ),
    Rule(
        Cause.NCCL,
        raised=_REFUSES,
        where=r"device_communicators/(?:custom|quick)_all_?reduce",
        depth=2,
        moves=(("custom_all_reduce", "set"),),
    ),
    Rule(
        Cause.NCCL,
        raised=_REFUSES,
        where=any_of(r"""
            device_communicators/pynccl
            torch/distributed/(?:distributed_c10d|rendezvous)
            :init_process_group:
            :init(?:ialize)?_(?:distributed_environment|model_parallel):
        """),
        depth=2,
    ),
    # While modules are still being imported: two packages that do not fit each other.
    Rule(
        Cause.MISSING_DEPENDENCY,
        raised=_BREAKS,
        where=r"(?<!launch_server\.py)(?<!bin/vllm)(?<!bin/sglang)(?<!\brunpy\.py):<module>:",
        depth=2,
    ),
)

SHARED_RULES = (
    *_COMMAND_LINE,
    *_SYSTEM,
    *_GPU_MEMORY,
    *_GPU,
    *_KERNELS,
    *_HUB,
    *_DEPENDENCIES,
    *_COLLECTIVES,
    *_CHECKPOINT,
    *_PROCESSES,
    *_CONFIG,
    *_PLACES,
)

MOVES: Mapping[Cause, tuple[tuple[str, Direction], ...]] = {
    Cause.OOM_GPU_WEIGHTS: (("tensor_parallel", "raise"), ("quantization", "change")),
    Cause.OOM_GPU_KV_POOL: (("memory", "lower"),),
    Cause.OOM_GPU_STATE_CACHE: (("running", "lower"), ("memory", "raise")),
    Cause.OOM_GPU_GRAPH_CAPTURE: (("memory", "lower"), ("graph", "lower")),
    Cause.OOM_GPU_RUNTIME: (("memory", "lower"), ("prefill", "lower"), ("running", "lower")),
    Cause.PORT_IN_USE: (("port", "change"),),
    Cause.MODEL_NOT_FOUND: (("model", "change"),),
    Cause.ILLEGAL_MEMORY_ACCESS: (("graph_off", "set"), ("attention", "change")),
}

ADVICE: Mapping[Cause, str] = {
    Cause.OOM_GPU_WEIGHTS: "The weights do not fit: more GPUs, a smaller or quantised checkpoint, or no draft model.",
    Cause.OOM_GPU_KV_POOL: "The KV pool does not fit beside what else the GPU holds.",
    Cause.OOM_GPU_STATE_CACHE: "The state cache does not fit: fewer requests at a time, or a larger share of memory.",
    Cause.OOM_GPU_GRAPH_CAPTURE: "The pools left too little for CUDA graphs: a smaller pool, or fewer, smaller graphs.",
    Cause.OOM_GPU_RUNTIME: "A forward pass did not fit beside the pools: smaller pools or chunks, fewer requests.",
    Cause.OOM_HOST: "Host memory ran out: less offloading and host cache, or a larger container limit.",
    Cause.CONFIG_INCOMPATIBLE: "The engine refuses this combination of flags, model and version.",
    Cause.UNKNOWN_ARGUMENT: "This version's command line does not know the flag or the value.",
    Cause.MODEL_NOT_FOUND: "Path or name of the model does not exist; a missing folder is taken for a hub name.",
    Cause.HUB_ACCESS: "The hub gave no access: a token, an accepted licence, the network, or a local copy.",
    Cause.WEIGHTS_MISMATCH: "Checkpoint and code disagree: another version, another draft, or a complete download.",
    Cause.PORT_IN_USE: "Another process listens on the port.",
    Cause.MISSING_DEPENDENCY: "A package is missing, too old or too new for this engine.",
    Cause.KERNEL_BUILD: "A kernel could not be compiled or loaded: compiler and CUDA toolkit, or another backend.",
    Cause.DRIVER_MISMATCH: "The GPU driver and the CUDA version of the packages do not fit each other.",
    Cause.UNSUPPORTED_HARDWARE: "This machine's GPU, or its absence, cannot do what was asked.",
    Cause.NCCL: "Communication between ranks failed: a rank that died first, network, shared memory or topology.",
    Cause.WATCHDOG_TIMEOUT: "A watchdog ended a process that made no progress.",
    Cause.STARTUP_HANG: "Never ready, and no error in the log: slow (compiling, downloading), hung, or still starting.",
    Cause.ILLEGAL_MEMORY_ACCESS: "A kernel touched memory that it must not, an engine bug: no graphs, another backend.",
    Cause.ENGINE_CRASH: "An exception or a signal inside the engine that no flag is known for.",
    Cause.DISK_FULL: "The disk is full.",
    Cause.PERMISSION: "A file or a device may not be used by this user.",
    Cause.GPU_BUSY: "Another process holds this GPU's memory: end it or wait; the configuration is not to blame.",
    Cause.OTHER: "None of the known kinds of failure.",
    Cause.UNKNOWN: "No known failure, and no sign of a server that serves.",
}
